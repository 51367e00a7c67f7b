"""Write the generated parts of README.md and docs/ from the code and from bench/results: ``python -m tests.docs``."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def fill(text: str, name: str, body: str) -> str:
    """Return a document with one generated block replaced."""
    block = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not block.search(text):
        raise SystemExit(f"no generated block {name!r}")
    return block.sub(lambda m: f"{m[1]}{body.strip()}\n{m[2]}", text)


def results() -> list[dict]:
    """Return every kept result, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "bench" / "results").glob("*.json"))]


def support() -> str:
    """Return the support matrix: what ran on hardware (from bench/results), what was only compiled."""
    from fp4dispatch import registry
    from fp4dispatch.backends.catalogue import catalogue

    ran: dict[tuple[str, str], str] = {}
    for result in results():
        for row in result.get("ran", []):
            ran[(row["backend"], row["op"])] = f"{row['device']} ({result['date']})"
    lines = ["| backend | op | GPU archs | activations | state |", "|---|---|---|---|---|"]
    available = registry.backends()
    for capability in catalogue().capabilities:
        archs = ", ".join(str(arch) for arch in capability.archs) if capability.archs else "any, and CPU"
        key = (capability.backend, capability.op)
        state = f"ran on {ran[key]}" if key in ran else "not run on hardware"
        if capability.backend not in available:
            state = "not part of this version"
        lines.append(
            f"| {capability.backend} | {capability.op} | {archs} | {', '.join(capability.activations)} | {state} |"
        )
    return "\n".join(lines)


def generate() -> dict[Path, str]:
    """Return each generated document as it should be."""
    from fp4dispatch import settings

    readme = ROOT / "README.md"
    text = fill(readme.read_text(), "settings", settings.markdown_table())
    return {readme: fill(text, "support", support())}


if __name__ == "__main__":
    for path, text in generate().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
