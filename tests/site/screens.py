"""Pictures of what a user sees, in docs/images: terminals and pages. Made by ``python -m tests.site.screens``.

``python -m tests.site.screens explain page-start`` makes only these. Those of the demo and the doctor are of the
machine that makes them. Pages need Chromium.
"""

from __future__ import annotations

import fcntl
import functools
import io
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTH = 100
COMMANDS = {
    "demo": "fp4dispatch demo",
    "explain": "fp4dispatch explain nvfp4_gemm -m 64 -n 4096 -k 4096 --arch 9.0 --cuda 13.0 --proven",
    "doctor": "FP4_GEMM_BACKEND=cutlas fp4dispatch doctor",
}
"""Picture -> what is typed. The doctor has something to find."""
PAGES = {"page-start": "index.html", "page-auto": "reference/auto.html", "page-errors": "guide/troubleshooting.html"}
"""Picture -> page of the site."""
WINDOW = {"width": 1280, "height": 800}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def terminal(line: str, cache: Path) -> str:
    """Return what a command line prints on a terminal, colours included; names of this machine's folders are cut."""
    words = shlex.split(line)
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("FP4", "NO_COLOR", "COLORTERM"))}
    env = ours | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "FP4DISPATCH_CACHE_DIR": str(cache)} | variables
    ours_end, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    command = [sys.executable, "-m", *words]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=null, stdout=its_end, stderr=null):
        os.close(its_end)
        raw = b"".join(_read(ours_end))
    os.close(ours_end)
    said = raw.decode("utf-8").replace("\r\n", "\n").rstrip()
    for place, shown in ((cache, "~/.cache/fp4dispatch"), (ROOT, "~/fp4dispatch"), (Path.home(), "~")):
        said = said.replace(str(place), shown)
    return said


def _read(descriptor: int) -> Iterator[bytes]:
    with suppress(OSError):  # EIO: the other end is closed
        while part := os.read(descriptor, 65536):
            yield part


def picture(name: str, line: str, said: str) -> str:
    """Return a terminal as an SVG that needs no font of a foreign server."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {line}", style="bold"), soft_wrap=False)
    console.print(Text.from_ansi(said))
    console.print(" ")  # rich cuts the last line at its baseline
    found = console.export_svg(title="fp4dispatch", unique_id=name)
    found = re.sub(r"@font-face \{.*?\}", "", found, flags=re.DOTALL).replace("Fira Code, monospace", FONT)
    return "\n".join(text.rstrip() for text in found.splitlines() if text.strip()) + "\n"


def terminals(cache: Path, *names: str) -> Iterator[tuple[str, str]]:
    """Yield the file name and the text of each picture of a terminal."""
    for name in names or COMMANDS:
        yield f"{name}.svg", picture(name, COMMANDS[name], terminal(COMMANDS[name], cache))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a built site; yields its address on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def browser() -> str | None:
    """Return the path of a Chromium; None without one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def pages(address: str, tab: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and the bytes of each picture of a page, in the light theme."""
    tab.set_viewport_size(WINDOW)
    tab.emulate_media(color_scheme="light")
    for name, path in PAGES.items():
        tab.goto(address + path, wait_until="networkidle")
        yield f"{name}.png", tab.screenshot()


def main(names: Sequence[str]) -> None:
    """Write the named pictures; all without a name."""
    wanted = names or [*COMMANDS, *PAGES]
    if unknown := set(wanted) - {*COMMANDS, *PAGES}:
        raise SystemExit(f"{', '.join(sorted(unknown))}: no picture; known: {', '.join([*COMMANDS, *PAGES])}")
    with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as scratch:
        typed = [name for name in wanted if name in COMMANDS]
        for name, text in terminals(Path(scratch, "cache"), *typed) if typed else ():
            IMAGES.joinpath(name).write_text(text, "utf-8")
            print(name, len(text) // 1000, "kB")
        if not set(wanted) & set(PAGES):
            return
        from playwright.sync_api import sync_playwright

        site = Path(scratch, "site")
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
        subprocess.run(words, cwd=ROOT, check=True)
        with served(site) as address, sync_playwright() as driver:
            opened = driver.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
            for name, data in pages(address, opened.new_page()):
                if name.removesuffix(".png") not in wanted:
                    continue
                IMAGES.joinpath(name).write_bytes(data)
                print(name, len(data) // 1000, "kB")
            opened.close()


if __name__ == "__main__":
    main(sys.argv[1:])
