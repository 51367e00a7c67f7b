"""What ``--help`` shows beside the arguments: plain text, and examples for every command."""

from __future__ import annotations

import argparse
import re
import textwrap

EXAMPLES: dict[str, tuple[str, ...]] = {
    "bench": (
        "fp4dispatch bench --quick",
        "fp4dispatch bench --shape 4096x14336 -m 1 -m 64 --json bench.json --plot bench.svg",
        "fp4dispatch bench --suite full --compare bench.json",
    ),
    "build": (
        "fp4dispatch build --arch 9.0",
        "fp4dispatch build --arch 12.0 --ops nvfp4_gemm,nvfp4_quantize --out kernels",
        "fp4dispatch build --arch 9.0 --out kernels --wheel dist",
    ),
    "cache": (
        "fp4dispatch cache list",
        "fp4dispatch cache prune --max-age 30d --max-size 2GB",
    ),
    "demo": ("fp4dispatch demo", "fp4dispatch demo --format fp8_row --device cpu"),
    "doctor": ("fp4dispatch doctor", "fp4dispatch doctor --json"),
    "env": ("fp4dispatch env", "fp4dispatch env --json"),
    "explain": (
        "fp4dispatch explain fp8_gemm -m 16 -n 4096 -k 4096",
        "fp4dispatch explain nvfp4_gemm -m 1 -n 28672 -k 8192 --arch 12.0 --cuda 13.0 --cudnn 9.19 --all",
        "fp4dispatch explain nvfp4_gemm -m 64 -n 4096 -k 4096 --gpu 'H100 SXM' --cuda 13.0 --nvcc 13.0 --backend w4a16",
    ),
    "quantize": (
        "fp4dispatch quantize Llama-3.1-8B Llama-3.1-8B-NVFP4 --format modelopt",
        "fp4dispatch quantize MODEL OUT --format fp8-block --exclude '*.down_proj'",
    ),
    "tune": (
        "fp4dispatch tune fp8_gemm --nk 4096x4096 --nk 14336x4096 -m 1,16,64 --scaling row",
        "fp4dispatch tune --model-shapes Llama-3.1-8B --out tables --seconds 300",
        "fp4dispatch tune --list",
    ),
    "verify": ("fp4dispatch verify", "fp4dispatch verify --race --rounds 10"),
}
"""Commands that a user would type; a test parses each."""

_COMMAND = re.compile(r"^fp4dispatch \w+( --\w+)?: ")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Formatter(argparse.HelpFormatter):
    """Wraps paragraphs; leaves indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = []
        for part in re.split(r"\n\s*\n", text.strip("\n")):
            example = any(line.startswith("  ") for line in part.splitlines())
            parts.append(part if example else textwrap.fill(" ".join(part.split()), width))
        return textwrap.indent("\n\n".join(parts), indent)


def plain(text: str) -> str:
    """Return a docstring without the marks of reStructuredText, and without the name of its command."""
    text = _ROLE.sub(r"\1", text).replace("``", "").replace("`", "")
    said = _COMMAND.sub("", text.strip())
    return said[:1].upper() + said[1:]


def complete(parser: argparse.ArgumentParser, command: str) -> None:
    """Give a command's parser its examples and a plain description."""
    parser.formatter_class = Formatter
    parser.description = plain(parser.description or "")
    parser.epilog = "\n".join(["examples:", *(f"  {example}" for example in EXAMPLES[command])])
