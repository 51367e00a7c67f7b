"""The commands build, verify and cache on a machine without GPU, with the pretended compiler where one is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fp4dispatch import cli
from fp4dispatch.errors import CompileError
from fp4dispatch.jit import kernels
from fp4dispatch.jit.store.cache import Cache


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_path_is_the_folder_that_is_used(capsys: pytest.CaptureFixture[str], cache_dir: Path) -> None:
    assert run(capsys, "cache", "path")[:2] == (0, f"{cache_dir}\n")
    assert json.loads(run(capsys, "cache", "path", "--json")[1]) == {"path": str(cache_dir)}


def test_an_empty_cache_lists_nothing_and_verifies_nothing(
    capsys: pytest.CaptureFixture[str], cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4dispatch.cli.cache.caches", lambda: [Cache(cache_dir)])
    code, out, _ = run(capsys, "cache", "list")
    assert (code, out) == (0, f"0 compiled kernels in {cache_dir}\n")
    code, out, _ = run(capsys, "verify")
    assert code == 1, "nothing to verify is no success"
    assert "no finished kernel in" in out
    assert "fix: fp4dispatch build" in out
    assert run(capsys, "cache", "clear")[0] == 0
    assert not cache_dir.exists()


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ("build", "--arch", "120f"),
        ("build", "--arch", "12.0", "--ops", "gemm"),
        ("cache", "burn"),
        ("verify", "--fast"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2, words
    monkeypatch.delenv("FP4DISPATCH_ARCH", raising=False)
    monkeypatch.setattr("fp4dispatch.cli.build._default_archs", tuple)
    code, _, err = run(capsys, "build")
    assert code == 2
    assert "say what to build for" in err


def test_the_arch_that_is_pretended_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.cli.build import _default_archs
    from fp4dispatch.problem.arch import SM120

    monkeypatch.setenv("FP4DISPATCH_ARCH", "12.0")
    assert _default_archs() == (SM120,)


def test_without_a_toolchain_the_fix_is_printed_and_json_stays_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(tmp_path / "nvcc"))
    code, out, err = run(capsys, "build", "--arch", "12.0", "--ops", "nvfp4_gemm")
    assert code == 1
    assert "NOT BUILT" in out
    assert "ToolchainError: cannot compile for target 120f" in err
    code, out, _ = run(capsys, "build", "--arch", "12.0", "--ops", "nvfp4_gemm", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    assert "fix:" in report["error"]
    assert {row["op"] for row in report["kernels"]} == {"nvfp4_gemm"}


def test_all_that_is_missing_is_said_at_once_for_every_target(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(kernels, "build_all", lambda *_, **__: pytest.fail("it began to build"))
    code, _, err = run(capsys, "build", "--arch", "9.0,12.0", "--ops", "nvfp4_gemm,w8_gemm")
    assert code == 1
    assert "cannot compile for target 90a" in err
    assert "cannot compile for target 120f" in err
    assert re.search(r"nothing was compiled; \d+ kernels are missing", err)


def test_a_wheel_needs_a_folder_of_kernels_for_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "build", "--arch", "9.0", "--wheel", "dist")
    assert code == 2
    assert "--wheel needs --out DIR" in err


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (("--ops", "w8_gemm", "--variant", "bf16", "--variant", "bf61"), "--variant bf61"),
        (("--ops", "w8_gemm,race_chain", "--variant", "bf16"), "--ops race_chain"),
        (("--ops", "w8_gemm,w4_activations", "--arch", "12.0"), "--ops w4_activations"),
    ],
)
def test_a_name_that_means_no_kernel_beside_others_is_an_error(
    words: tuple[str, ...], lost: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "build_all", lambda *_, **__: pytest.fail("it began to build"))
    code, _, err = run(capsys, "build", "--arch", "9.0", *words)
    assert code == 1
    assert f"no kernel matches {lost} beside the rest: leave it out" in err


def test_verbose_shows_the_log_beside_json_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("all that nvcc said")

    def fail(*args: object, **kwargs: object) -> None:
        raise CompileError("nvcc failed", log=log)

    monkeypatch.setattr("fp4dispatch.cli.build._check_tools", lambda *_: None)
    monkeypatch.setattr(kernels, "build_all", fail)
    words = ("build", "--arch", "12.0", "--ops", "nvfp4_gemm", "--json")
    assert "all that nvcc said" not in run(capsys, *words)[2]
    code, out, err = run(capsys, *words, "--verbose")
    assert (code, json.loads(out)["error"]) == (1, "nvcc failed")
    assert "all that nvcc said" in err


def test_an_arch_without_kernels_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "build", "--arch", "7.5")
    assert code == 1
    assert "no kernel matches arch 7.5" in err
    assert "Kernels of these ops are for 8.0, 8.6, 8.9, 9.0, 10.0" in err


def test_a_cache_that_others_can_write_is_refused(capsys: pytest.CaptureFixture[str], cache_dir: Path) -> None:
    (cache_dir / "kernels").mkdir(parents=True)
    cache_dir.chmod(0o777)
    code, _, err = run(capsys, "verify")
    assert code == 1
    assert "CacheError" in err
    assert "chmod go-w" in err


def test_the_installed_folder_is_searched_after_the_users(cache_dir: Path) -> None:
    roots = [cache.root for cache in kernels.caches()]
    assert roots[0] == cache_dir
    assert all(root.name == "prebuilt" for root in roots[1:])


@pytest.mark.parametrize("folder", ["/proc/no_such", "/etc/passwd/x", "/dev/null/x"])
def test_a_cache_that_cannot_be_made_is_an_error_with_the_fix(folder, capsys, monkeypatch):
    for words in (["--out", folder], []):
        if not words:
            monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", folder)
        assert cli.main(["build", "--arch", "9.0", "--ops", "w8_gemm", *words]) == 1
        err = capsys.readouterr().err
        assert "Error: " in err
        assert folder in err
        assert "fix: " in err
        assert "Traceback" not in err
