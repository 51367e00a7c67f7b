"""The documentation site: built with warnings as errors, every link and picture there, opened in a browser."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

import fp4dispatch
from fp4dispatch.benchmark.reports import records, standing
from fp4dispatch.policy.rules import rules
from tests.site import figures, policy, screens, speed, svg

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
QUIET = {"NO_MKDOCS_2_WARNING": "1"}


def mkdocs(out: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site, warnings as errors. Not with ``--quiet``: what it hides is no error."""
    import os

    pytest.importorskip("material", reason="mkdocs-material (extra `docs`) is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings (extra `docs`) is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("site")
    done = mkdocs(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


# ------------------------------------------------------------------------------------------------------ the built site


def page(path: Path):
    """One page of the site, parsed."""
    soup = pytest.importorskip("bs4", reason="beautifulsoup4 (extra `test`) is not installed")
    return soup.BeautifulSoup(path.read_text("utf-8"), "html.parser")


def test_every_link_anchor_and_picture_of_the_site_is_there(site):
    parsed = {path: page(path) for path in site.rglob("*.html")}
    ids = {path: {tag["id"] for tag in tree.find_all(id=True)} for path, tree in parsed.items()}
    assert len(parsed) > 25
    followed, wrong = 0, []
    for path, tree in parsed.items():
        if path.name == "404.html":  # it is served at any depth
            continue
        found = [tag[name] for name in ("href", "src") for tag in tree.find_all(attrs={name: True})]
        for link in found:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "mailto", "data"), link
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            followed += 1
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in ids.get(target, ())):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert wrong == []
    assert followed > 1000


def test_every_page_can_be_reached_from_the_first(site):
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in site.rglob("*.html")}
    seen, todo = set(), [site / "index.html"]
    while todo:
        path = todo.pop()
        if path in seen or path.suffix != ".html":
            continue
        seen.add(path)
        links = (urlsplit(tag["href"]) for tag in page(path).find_all("a", href=True))
        todo += [(path.parent / link.path).resolve() for link in links if link.path and not link.scheme]
    assert {path for path in site.rglob("*.html") if path.name != "404.html"} <= seen


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the site on this machine."""
    with screens.served(site) as address:
        yield address


def test_a_browser_opens_every_page_and_fetches_nothing_from_elsewhere(site, served):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright (extra `test`) is not installed")
    browser = screens.browser()
    if browser is None:
        pytest.skip(f"none of {', '.join(screens.BROWSERS)} is on PATH, e.g. apt-get install chromium")
    wrong: list[str] = []
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = opened.new_page()
        tab.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("response", lambda r: wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        tab.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((served, "data:", "blob:")) else None)
        for path in sorted(site.rglob("*.html")):
            tab.goto(served + path.relative_to(site).as_posix(), wait_until="load")
            empty = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
            wrong += [f"{path.name}: empty picture {src}" for src in tab.evaluate(empty)]
            if tab.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1"):
                wrong.append(f"{path.name} is wider than the window")
        tab.goto(served + "index.html", wait_until="networkidle")
        tab.get_by_placeholder("Search").click()
        tab.get_by_placeholder("Search").press_sequentially("fi-cutlass-pdl-no-gdc")
        hit = tab.locator(".md-search-result__link[href$='#fi-cutlass-pdl-no-gdc']").first
        hit.wait_for(timeout=20_000)
        pictures = dict(screens.pages(served, opened.new_page()))
        opened.close()
    assert wrong == []
    assert set(pictures) == {f"{name}.png" for name in screens.PAGES}
    assert all(20_000 < len(data) < 200_000 for data in pictures.values())


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("no-such-page.md", "docs/release.md links to docs/no-such-page.md, which is no file of the repository"),
        ("../csrc/no-such.cu", "docs/release.md links to csrc/no-such.cu, which is no file of the repository"),
        ("graphs.md#no-such-part", "does not contain an anchor '#no-such-part'"),
    ],
)
def test_a_broken_link_stops_the_build(link, why, tmp_path):
    for path in ROOT.iterdir():
        if path.name not in ("docs", ".git", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(DOCS, tmp_path / "docs")
    with (tmp_path / "docs" / "release.md").open("a", encoding="utf-8") as file:
        file.write(f"\n[gone]({link})\n")
    done = mkdocs(tmp_path / "out", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert why in done.stdout + done.stderr


# ----------------------------------------------------------------------------------------------------- what pages hold


def module(name: str):
    """A module of docs/site, which is no package."""
    pytest.importorskip("mkdocs", reason="mkdocs (extra `docs`) is not installed")
    pytest.importorskip("griffe", reason="griffe (extra `docs`) is not installed")
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_links_in_code_are_no_links():
    hooks = module("hooks")
    text = (
        "[a](docs/graphs.md) `[b](c.md)`\n\n```text\n[d](e.md)\n```\n[f](https://x.org) [g](#here) [h](csrc/i.cu#L3)\n"
    )
    assert [path for _, path in hooks.links(text, "index.md")] == ["docs/graphs.md", "csrc/i.cu"]
    assert hooks.place("docs/graphs.md") == "graphs.md"
    assert hooks.place("csrc/i.cu") == "source/csrc/i.cu.txt"
    assert [path for _, path in hooks.links("[a](../../README.md)", "guide/x.md")] == ["README.md"]


def test_upstream_numbers_become_links():
    hooks, text = module("hooks"), (DOCS / "incidents.md").read_text("utf-8")
    shown = hooks.threads(text)
    assert "[#2708](https://github.com/flashinfer-ai/flashinfer/issues/2708)" in shown
    assert "[vLLM#34948](https://github.com/vllm-project/vllm/issues/34948)" in shown
    assert shown.count("](https://github.com/") == len(re.findall(r"#\d", text))


def test_docstrings_become_markdown():
    head, rule = "Use :func:`~a.b.c` or :class:`D`::", "Parameters\n----------\n"
    whole = {"a.b.c": "a.b.c", "D": "x.D"}.__getitem__
    docstring = f"{head}\n\n{rule}include, exclude\n    Patterns.\nlast\n    Other.\n"
    shown = module("docstrings").markdown(docstring, whole)
    link = '<autoref optional identifier="{}"><code>{}</code></autoref>'
    parameters = "include\n    Patterns.\nexclude\n    Patterns.\n\nlast\n    Other."
    assert shown == f"Use {link.format('a.b.c', 'c')} or {link.format('x.D', 'D')}:\n\n{rule}{parameters}"


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "reference" / "api.md").read_text("utf-8")
    named = re.findall(r"^::: (\S+)(?:\n    options: \{heading: (\S+)\})?$", text, re.MULTILINE)
    wanted = {f"fp4dispatch.{name}" for name in fp4dispatch.__all__ if name != "__version__"}
    wanted |= {f"fp4dispatch.graphs.{name}" for name in fp4dispatch.graphs.__all__}
    wanted.add("QuantizedLinear")  # what both layers have
    assert sorted(heading or name for name, heading in named) == sorted(wanted)


def test_every_rule_is_on_the_page_about_auto():
    text = policy.policy()
    assert re.findall(r"^### (\S+)$", text, re.MULTILINE) == sorted(
        (rule.id for rule in rules()), key=lambda i: [r.verb for r in rules() if r.id == i] != ["deny"]
    )
    for rule in rules():
        assert rule.because[1:] in text
        assert policy.condition(rule.when)


def texts() -> set[str]:
    """Every text of the package's sources, with … for what is filled in."""
    found = set()
    for path in sorted((ROOT / "fp4dispatch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def quoted() -> list[str]:
    """The errors of the page about errors."""
    text = (DOCS / "guide" / "troubleshooting.md").read_text("utf-8")
    return re.findall(r"^> (.+)$", text, re.MULTILINE)


def test_every_error_that_is_quoted_is_one_of_the_source():
    sources = texts()
    errors = quoted()
    assert len(errors) > 25
    assert [error for error in errors if not any(error in source for source in sources)] == []


def test_pages_name_only_commands_of_the_command_line():
    from fp4dispatch.cli import HELP

    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        found = re.findall(r"(?:^|`)(?:[A-Z0-9_]+=\S+ )*fp4dispatch ([a-z]+)", path.read_text("utf-8"), re.MULTILINE)
        assert set(found) <= set(HELP), path


# ------------------------------------------------------------------------------------------------------------- pictures


def texts_of(picture: str) -> list[str]:
    """What a picture says."""
    return [node.text or "" for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def bars(picture: str) -> list[ElementTree.Element]:
    """The bars, after the marks of the legend."""
    return [node for node in ElementTree.fromstring(picture).iter() if (node.get("class") or "")[0:1] == "f"]


def test_a_bar_is_as_high_as_its_number():
    series = [svg.Series("a", {"x": 2.0, "y": 1.0}), svg.Series("b", {"y": 0.5})]
    picture = svg.draw([svg.Chart("t", ["x", "y"], series, "z", line=1.0, digits=2)], "note & more")
    first, second, third = bars(picture)[2:]  # the first two are the legend's
    heights = [float(bar.get("height")) for bar in (first, second, third)]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[0] == pytest.approx(4 * heights[2], abs=0.4)
    one = re.search(r'class="one"[^>]* d="M[\d.]+ ([\d.]+)H', picture)
    assert one is not None
    assert float(second.get("y")) == pytest.approx(float(one[1]), abs=0.2)
    assert {"2.00", "1.00", "0.50", "note & more"} <= set(texts_of(picture))


def test_colours_can_be_read_on_their_background():
    def light(colour: str) -> float:
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colours, back in ((svg.LIGHT, "#ffffff"), (svg.DARK, "#161b22")):
        for colour in colours:
            high, low = sorted((light(colour), light(back)), reverse=True)
            assert (high + 0.05) / (low + 0.05) > 4, colour


def test_the_table_of_speeds_is_of_every_card_that_a_record_is_of(tmp_path, monkeypatch):
    (first,) = (run for run in figures.runs("targets") if "H200" in run["facts"]["device"])
    for record in (first, *figures.runs("targets all peers")):
        for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
            if record["subject"] == "targets" or device == "NVIDIA H200":
                other = record | {"facts": record["facts"] | {"device": device}}
                records.keep(tmp_path, other)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert speed.table().count("| `FP4Linear` |") == 2


def test_the_picture_of_speeds_is_of_the_newest_run_of_each_size_on_every_card(tmp_path, monkeypatch):
    def keep(run, seed, **more):
        other = run | {"seed": seed, "subject": f"seed {seed}", "facts": run["facts"] | more}
        records.keep(tmp_path, other)

    ours = next(run for run in figures.random_runs() if figures.card(run) == "H200")
    without = [row for row in ours["measured"] if row["method"] != "humming/nvfp4"]
    keep(ours, 1, device="NVIDIA H200", date="2026-01-01", commit="0ldest")
    keep(ours, 2, device="NVIDIA H200", date="2026-01-02", commit="newest")
    keep(ours | {"measured": without}, 3, device="NVIDIA H100 80GB HBM3", commit="0ther")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    said = texts_of(figures.speed())
    panels = [text.split(":")[0] for text in said if "how many times" in text]
    assert panels == ["H100", "H200"]
    assert "newest" in said[-1]
    assert "0ldest" not in said[-1]
    assert said.count("NVFP4, ours") == 2
    assert said.count("NVFP4, Humming") == 1
    mean, problems = standing.means(ours, "FP4Linear", small=False)[0]
    assert problems > 3
    assert f"{mean:.2f}" in said
    *cards, about = speed.headline().split("\n\n")
    assert [line.split(":")[0] for line in cards] == ["**H100", "**H200"]
    assert f"{mean:.1f} times as fast as bf16** with 1 to 16 tokens (mean of {problems} problems)" in cards[1]
    assert "random" in about


@pytest.mark.parametrize("make", [figures.speed, figures.decoder, figures.accuracy])
def test_a_picture_says_where_it_is_from_and_nothing_lies_outside(make):
    picture = make()
    root = ElementTree.fromstring(picture)
    _, _, width, height = map(float, root.get("viewBox").split())
    assert root.get("aria-label")
    assert re.search(r"Commits: ([0-9a-f]{7,}(, |\.$))+$", " ".join(texts_of(picture)))  # the last words
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        wide = 7.5 * len(node.text or "")
        left = float(node.get("x")) - {"end": wide, "middle": wide / 2}.get(node.get("text-anchor"), 0)
        assert left >= -8
        assert left + wide <= width + 8, node.text
        assert 0 < float(node.get("y")) < height
    assert "nan" not in picture.replace("tenan", "")
