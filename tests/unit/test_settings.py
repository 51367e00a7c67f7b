"""Settings: strict parsing, laziness, unknown names, and that no other file reads the environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fp4dispatch
from fp4dispatch.errors import SettingsError
from fp4dispatch.settings import PREFIX, SETTINGS, did_you_mean, markdown_table, settings

PACKAGE = Path(fp4dispatch.__file__).parent


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.name, raising=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp4_gemm_backend", "auto"),
        ("fp8_backend", "auto"),
        ("pdl", "auto"),
        ("selfcheck", "auto"),
        ("tuned", "auto"),
        ("jit", True),
        ("fp8_copy", False),
        ("nvtx", False),
        ("cuda_device_order", "FASTEST_FIRST"),
        ("disable", None),
        ("cache_dir", None),
        ("arch", None),
        ("log", None),
        ("nvcc", None),
        ("max_jobs", None),
        ("cuda_home", None),
        ("cuda_visible_devices", None),
        ("no_color", None),
        ("xdg_cache_home", None),
        ("cutlass_path", None),
    ],
)
def test_defaults(key: str, value: object) -> None:
    assert getattr(settings, key) == value
    assert not settings.is_set(key)


def test_every_setting_has_its_default_tested() -> None:
    (marks,) = [mark for mark in test_defaults.pytestmark if mark.name == "parametrize"]
    assert {key for key, _ in marks.args[1]} == set(SETTINGS)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("jit", "0", False),
        ("jit", " OFF ", False),
        ("jit", "yes", True),
        ("pdl", "OFF", "off"),
        ("selfcheck", "force", "force"),
        ("log", "Debug", "debug"),
        ("max_jobs", " 8 ", 8),
        ("max_jobs", "999999", 999999),
        ("disable", "cutlass, CUDNN,,", ("cutlass", "cudnn")),
        ("cache_dir", "/a b/c", Path("/a b/c")),
        ("cache_dir", "~/x", Path.home() / "x"),
        ("cache_dir", "some/cache", Path.cwd() / "some/cache"),
        ("cuda_visible_devices", "", ""),
        ("cuda_device_order", "", ""),
        ("fp4_gemm_backend", "cudnn", "cudnn"),
        ("fp4_gemm_backend", "", "auto"),
        ("jit", "", True),
        ("max_jobs", "", None),
    ],
)
def test_values(key: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS[key].name, text)
    assert getattr(settings, key) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("jit", "maybe"),
        ("jit", "2"),
        ("pdl", "on"),
        ("selfcheck", "1"),
        ("tuned", "force"),
        ("log", "verbose"),
        ("max_jobs", "0"),
        ("max_jobs", "-1"),
        ("max_jobs", "1e3"),
        ("max_jobs", "1000000"),
        ("max_jobs", "²"),
        ("max_jobs", "8 9"),
        ("cache_dir", "~nobody-of-that-name/x"),
    ],
)
def test_wrong_values_name_the_variable_and_the_value(key: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS[key].name, text)
    with pytest.raises(SettingsError) as caught:
        getattr(settings, key)
    assert str(caught.value).startswith(f"{SETTINGS[key].name}={text!r} is not ")


def test_the_nearest_value_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "forse")
    with pytest.raises(SettingsError, match="Did you mean force"):
        _ = settings.selfcheck
    assert did_you_mean("cudn", ["cutlass", "cudnn"]) == " Did you mean cudnn?"
    assert did_you_mean("zzz", ["cutlass"]) == ""


def test_values_are_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "2")
    assert settings.max_jobs == 2
    monkeypatch.setenv("MAX_JOBS", "3")
    assert settings.max_jobs == 3
    assert settings.is_set("max_jobs")


def test_unknown_names_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.unknown() == ()
    monkeypatch.setenv(PREFIX + "CACHEDIR", "x")
    monkeypatch.setenv("SOMETHING_ELSE", "x")
    (sentence,) = settings.unknown()
    assert (
        sentence
        == "FP4DISPATCH_CACHEDIR is set but is not a setting of fp4dispatch. Did you mean FP4DISPATCH_CACHE_DIR?"
    )


def test_names_that_are_meant_for_us_are_reported_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fp4dispatch_pdl", "FP4_GEMM_BACKENDS", "Fp4_Gemm_Backend"):
        monkeypatch.setenv(name, "x")
        assert any(f"{name} is set but" in sentence for sentence in settings.unknown())
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cudnn")
    assert not any(sentence.startswith("FP4_GEMM_BACKEND is") for sentence in settings.unknown())


def test_what_is_ignored_is_unset_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DISPATCH_PDL", "maybe")
    assert list(settings.errors()) == ["pdl"]
    with pytest.raises(SettingsError):
        settings.check()
    with settings.ignoring(settings.errors()):
        assert settings.pdl == "auto"
        assert "FP4DISPATCH_PDL" not in settings.environment()
    assert list(settings.errors()) == ["pdl"]
    assert settings.environment()["FP4DISPATCH_PDL"] == "maybe"


def test_an_unknown_key_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="max_job"):
        _ = settings.max_job


def test_the_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.environment()["MAX_JOBS"] = "9"
    assert settings.max_jobs is None


def test_table_lists_every_setting() -> None:
    table = markdown_table()
    assert len(table.splitlines()) == len(SETTINGS) + 2
    assert all(f"| `{s.name}` |" in table and s.doc in table for s in SETTINGS.values())


def environment_reads(source: str) -> list[int]:
    """Lines that touch the environment by any of its names."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    ]


def test_only_settings_reads_the_environment() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    reads = {str(file.relative_to(PACKAGE)): environment_reads(file.read_text()) for file in files}
    assert reads.pop("settings.py")
    assert {name: lines for name, lines in reads.items() if lines} == {}


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.getenv('A')"]
)
def test_the_search_finds_readers(source: str) -> None:
    assert environment_reads(source)
