"""The layout of the package, from its syntax trees: imports point one way, some things are done in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fp4dispatch"

# The data flow, first to last: a package imports from itself and from the packages before it.
ORDER = (
    *("errors", "settings", "strict_toml", "problem", "machine", "formats", "policy", "jit", "backends", "trust"),
    *("dispatch", "tune", "run", "models", "checkpoints", "graphs", "integrations", "benchmark", "cli"),
)
# One-line modules that re-export from a package, for users, plug-ins and old pickles.
PATHS_FOR_OTHERS = {"linear": "models", "decision": "problem", "stored_weights": "models"}
PLACE = {
    **{name: i for i, name in enumerate(ORDER)},
    **{name: ORDER.index(package) for name, package in PATHS_FOR_OTHERS.items()},
    "csrc": ORDER.index("jit"),
    "jit_flags": ORDER.index("jit"),
    "__init__": ORDER.index("benchmark"),
    "__main__": ORDER.index("cli"),
}

TORCH_FREE = (
    *("settings", "problem", "problem.arch", "problem.decision", "problem.measurement", "machine.system"),
    *("policy.resolve", "policy.rules", "policy.capability", "backends.registry", "jit.store.records"),
    *("trust.quarantine", "trust.facts", "trust.verdict"),
    *(f"dispatch.{name}" for name in ("choose", "explain", "here", "report", "request", "tuned", "whatif")),
)
VERSION = "fp4dispatch.__version__"  # a constant that anyone may name, e.g. in a cache key
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def modules() -> dict[str, ast.Module]:
    """Dotted name below the package -> syntax tree; ``__init__`` is the package itself."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)
        found[name] = ast.parse(path.read_text("utf-8"))
    return found


def imports(tree: ast.AST, *, deferred: bool = True) -> Iterator[str]:
    """Every module or name that is imported, dotted; not what is under ``if TYPE_CHECKING``.

    ``deferred``: also what functions import when they are called.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), deferred=deferred)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import: {ast.unparse(node)}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif deferred or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, deferred=deferred)


def for_types(tree: ast.Module) -> Iterator[str]:
    """Every module or name that is imported under ``if TYPE_CHECKING``, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.body, []))


def own(target: str, known: dict[str, ast.Module]) -> str | None:
    """Which module of ours an import means, None for others'."""
    head, *rest = target.split(".")
    if head != "fp4dispatch":
        return None
    while rest and ".".join(rest) not in known:
        rest.pop()
    return ".".join(rest) or "__init__"


def upward(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> list[str]:
    place = PLACE[name.split(".")[0]]
    wrong = []
    for target in imports(tree):
        mine = own(target, known) if target != VERSION else None
        if mine is not None and PLACE[mine.split(".")[0]] > place:
            wrong.append(f"{name} imports {target}, which is in a package after its own")
    return wrong


MODULES = modules()


def test_every_module_has_a_room():
    assert {name.split(".")[0] for name in MODULES} - set(PLACE) == set()


@pytest.mark.parametrize("name", PATHS_FOR_OTHERS)
def test_paths_for_others_hold_no_code(name):
    kinds = {type(node) for node in MODULES[name].body}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    assert upward(name, MODULES[name], MODULES) == []


def in_a_cycle(known: dict[str, ast.Module]) -> set[str]:
    """Modules that import each other, or that need one that does; imports for types count."""
    graph = {
        name: {
            m for t in (*imports(tree, deferred=False), *for_types(tree)) if (m := own(t, known)) not in (None, name)
        }
        for name, tree in known.items()
    }
    done: set[str] = set()
    while ready := {name for name in graph if name not in done and graph[name] <= done}:
        done |= ready
    return set(graph) - done


def test_imports_have_no_cycle():
    assert in_a_cycle(MODULES) == set()


def both_ways(known: dict[str, ast.Module]) -> list[str]:
    """Folders of one package of which each imports the other."""
    folders = {".".join(name.split(".")[:2]) for name in known if (ROOT / Path(*name.split(".")[:2])).is_dir()}
    pairs = set()
    for name, tree in known.items():
        for target in imports(tree):
            a, b = (".".join((each or "").split(".")[:2]) for each in (name, own(target, known)))
            if a != b and {a, b} <= folders and a.split(".")[0] == b.split(".")[0]:
                pairs.add((a, b))
    return sorted(f"{a} and {b}" for a, b in pairs if (b, a) in pairs and a < b)


def test_folders_of_a_package_import_one_way():
    assert both_ways(MODULES) == []


def test_folders_that_import_each_other_are_noticed():
    back = ast.parse("def later():\n    from fp4dispatch.models.fusing import fuse")
    assert both_ways(MODULES | {"models.replacing.fusion": back}) == ["models.fusing and models.replacing"]


def test_a_cycle_of_types_is_noticed():
    typed = ast.parse("if TYPE_CHECKING:\n    from fp4dispatch.problem.decision import Decision\n")
    assert {"errors", "problem.decision", "problem.arch"} <= in_a_cycle(MODULES | {"errors": typed})


def environment_readers(tree: ast.Module) -> list[str]:
    found = [t for t in imports(tree) if t.startswith("os.") and t.split(".")[1] in ENVIRONMENT]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_only_settings_reads_the_environment(name):
    assert bool(environment_readers(MODULES[name])) == (name == "settings")


@pytest.mark.parametrize("name", MODULES)
def test_only_the_prober_imports_nvml(name):
    uses = [t for t in imports(MODULES[name]) if t.split(".")[0] == "pynvml"]
    assert bool(uses) == (name == "machine.nvml")


@pytest.mark.parametrize("name", MODULES)
def test_only_ranks_talks_to_other_ranks(name):
    uses = [t for t in imports(MODULES[name]) if t.startswith("torch.distributed")]
    uses += [n for n in ast.walk(MODULES[name]) if isinstance(n, ast.Attribute) and n.attr == "distributed"]
    assert bool(uses) == (name in ("machine.ranks", "machine.collectives", "integrations.tensor_parallel.styles"))


@pytest.mark.parametrize("name", MODULES)
def test_only_the_strict_reader_reads_toml(name):
    uses = [t for t in imports(MODULES[name]) if t.split(".")[0] in ("tomllib", "tomli")]
    assert bool(uses) == (name == "strict_toml")


def reached(name: str) -> set[str]:
    """Everything that importing a module imports, ours by module and others' by name."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        for target in imports(MODULES[todo.pop()], deferred=False):
            mine = own(target, MODULES)
            if (mine or target) not in seen:
                seen.add(mine or target)
                todo += [mine] if mine else []
    return seen


@pytest.mark.parametrize("name", TORCH_FREE)
def test_deciding_needs_no_torch(name):
    heavy = {"torch", "flashinfer", "cudnn", "numpy"}
    assert {t for t in reached(name) if t.split(".")[0] in heavy} == set()


def test_the_checks_see_what_they_look_for():
    bad = ast.parse(
        "import os\nfrom fp4dispatch import models\nfrom fp4dispatch.cli.env import run\n"
        "if TYPE_CHECKING:\n    from fp4dispatch.graphs import x\n"
        "def f():\n    import fp4dispatch.run.ops\n    os.getenv('A')\n"
    )
    known = MODULES | dict.fromkeys(("models", "run.ops", "graphs", "cli.env"), bad)
    assert [line.split()[2].rstrip(",") for line in upward("policy.resolve", bad, known)] == [
        "fp4dispatch.models",
        "fp4dispatch.cli.env.run",
        "fp4dispatch.run.ops",
    ]
    assert environment_readers(bad) == ["os.getenv"]
    assert environment_readers(ast.parse("from os import environ")) == ["os.environ"]
    assert list(imports(bad, deferred=False)) == ["os", "fp4dispatch.models", "fp4dispatch.cli.env.run"]
    with pytest.raises(AssertionError, match="relative"):
        list(imports(ast.parse("from . import x")))
