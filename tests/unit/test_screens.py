"""Pictures of terminals and pages: the script makes them as they are kept, they are small, and the docs show them."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.site import screens

SHOWN = [path.read_text("utf-8") for path in (screens.ROOT / "docs").rglob("*.md")]
SHOWN += [(screens.ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")]
SVG = "{http://www.w3.org/2000/svg}"


def kept(name: str) -> Path:
    """A picture of the repository."""
    return screens.IMAGES / name


def words(picture: str) -> str:
    """What a terminal shows, without spaces: they are of no fixed kind."""
    nodes = ElementTree.fromstring(picture).iter(f"{SVG}text")
    return "".join("".join(node.text or "" for node in nodes).split())


def test_a_terminal_is_kept_as_the_command_prints_it(tmp_path):
    ((name, text),) = screens.terminals(tmp_path / "cache", "explain")
    assert kept(name).read_text("utf-8") == text, "run `python -m tests.site.screens explain`"
    assert "#98a84b" in text  # green: it ran on a terminal


@pytest.mark.parametrize("name", screens.COMMANDS)
def test_a_terminal_shows_the_command_and_needs_no_network(name):
    text = kept(f"{name}.svg").read_text("utf-8")
    assert "".join(f"${screens.COMMANDS[name]}".split()) in words(text)
    assert "http" not in text.replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
    for place in ("/root", "/home", "/work", "/tmp"):
        assert place not in text
    assert max(float(node.get("y") or 0) for node in ElementTree.fromstring(text).iter(f"{SVG}text")) > 100
    assert len(text) < 200_000


def test_names_of_folders_are_cut(tmp_path, monkeypatch):
    program = f"print({str(screens.ROOT)!r} + '/x', {str(tmp_path)!r}, '\\033[1mbold', flush=True)"
    (tmp_path / "say.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = screens.terminal("A=b say", tmp_path)
    assert said == "~/fp4dispatch/x ~/.cache/fp4dispatch \x1b[1mbold"


@pytest.mark.parametrize("name", screens.PAGES)
def test_a_page_is_a_small_picture_of_a_wide_window(name):
    data = kept(f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) == tuple(screens.WINDOW.values())
    assert 20_000 < len(data) < 200_000


def test_a_picture_that_is_not_known_is_refused():
    with pytest.raises(SystemExit, match="nonsense: no picture; known: demo, explain"):
        screens.main(["nonsense"])


def test_every_picture_is_shown_somewhere():
    for path in screens.IMAGES.iterdir():
        assert any(f"images/{path.name}" in text for text in SHOWN), path.name
