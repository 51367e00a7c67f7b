"""Hooks of ``mkdocs build``: what stands outside of docs/ and belongs to the site.

- README.md, CONTRIBUTING.md and the other pages of ``PAGES`` become pages. They stay where they are.
- A rule that docs/incidents.md names becomes a link to it, and an upstream number such as ``vLLM#34948`` to its thread.
- A link to any other file of the repository leads to a copy of that file, as text. So links are right in the repository
  and on the site, for the commit that the site was built from, and without a network.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fp4dispatch.policy.rules import rules

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "bench/NOTES.md": "project/notes.md",
    "bench/README.md": "project/scripts.md",
    **{f"bench/notes/{path.name}": f"project/notes/{path.name}" for path in (ROOT / "bench" / "notes").glob("*.md")},
}
"""Path in the repository -> path in the site, of pages outside of docs/."""

FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[^\S\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.DOTALL)
RULE = re.compile(rf"`({'|'.join(re.escape(rule.id) for rule in rules())})`")
REPOSITORIES = {
    "": "flashinfer-ai/flashinfer",
    "CUTLASS": "NVIDIA/cutlass",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "pytorch": "pytorch/pytorch",
    "sglang": "sgl-project/sglang",
    "vLLM": "vllm-project/vllm",
}
"""What docs/incidents.md calls a repository -> its name on GitHub; a number alone is FlashInfer's."""
THREAD = re.compile(r"(?<![\w`/#-])(?P<name>[A-Za-z][\w-]*|)#(?P<number>\d+)\b(?!`)")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")


def origin(uri: str) -> str:
    """Return where a page of the site stands in the repository."""
    return next((path for path, page in PAGES.items() if page == uri), DOCS + uri)


def place(path: str) -> str:
    """Return where a file of the repository stands in the site."""
    if path in PAGES:
        return PAGES[path]
    shown = path.startswith(DOCS) and not path.endswith(".py")
    return path.removeprefix(DOCS) if shown else f"source/{path}.txt"


def code(text: str) -> Iterator[tuple[int, int]]:
    """Yield where code stands in a page: nothing in it is a link."""
    blocks = [match.span() for match in FENCE.finditer(text)]
    yield from blocks
    for match in CODE.finditer(text):
        if not any(start <= match.start() < end for start, end in blocks):
            yield match.span()


def links(text: str, uri: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each link of a page to a file of the repository, and that file's path in it."""
    spans = list(code(text))
    for match in LINK.finditer(text):
        if not any(start <= match.start() < end for start, end in spans):
            yield match, posixpath.normpath(posixpath.join(posixpath.dirname(origin(uri)), match["target"]))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside of docs/, and every file that a page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for page in list(files.documentation_pages()):
        for _, path in links(page.content_string, page.src_uri):
            uri = place(path)
            if uri in files.src_uris:
                continue
            if not (ROOT / path).is_file():
                raise PluginError(f"{origin(page.src_uri)} links to {path}, which is no file of the repository")
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    uri, parts, end = page.file.src_uri, [], 0
    for match, path in links(markdown, uri):
        parts += [markdown[end : match.start()], posixpath.relpath(place(path), posixpath.dirname(uri) or ".")]
        parts.append(match["anchor"] or "")
        end = match.end()
    text = "".join([*parts, markdown[end:]])
    return threads(RULE.sub(r"[`\1`](reference/auto.md#\1)", text)) if uri == "incidents.md" else text


def threads(text: str) -> str:
    """Return a page with a link at each upstream number. GitHub leads from an issue's address to a pull request."""

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}](https://github.com/{REPOSITORIES[match['name']]}/issues/{match['number']})"

    return THREAD.sub(link, text)
