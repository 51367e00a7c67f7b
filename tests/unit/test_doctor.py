"""``fp4dispatch doctor``: each check on made-up facts, and the command on broken installations."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp4dispatch
from fp4dispatch import cli
from fp4dispatch.cli import doctor
from fp4dispatch.cli.checks import CHECKS, Check, Child, Facts, Kept, gpus, state
from fp4dispatch.errors import SettingsError
from fp4dispatch.jit.packages import Package, Report
from fp4dispatch.machine.system import System
from fp4dispatch.settings import SETTINGS

GOOD: dict[str, Any] = {
    "arch": "12.0",
    "driver": "580.65",
    "driver_cuda": "13.0",
    "cuda": "13.0",
    "torch": "2.13.0+cu130",
    "cudnn": "9.23.1",
    "cudnn_path": "/site/nvidia/cudnn/lib/libcudnn.so.9",
    "cudnn_frontend": "1.14.0",
    "flashinfer": "0.7.2",
    "cutlass": "4.5.0",
    "nvcc": "13.0.88",
}
CHILD: dict[str, Any] = {"cuda": "13.0", "archs": ("sm_90", "sm_120"), "gpus": ("12.0",)}


@pytest.fixture
def examine(tmp_path: Path) -> Any:
    """Return the outcomes on a healthy machine with some facts replaced."""

    def run(child: dict[str, Any] | None = None, facts: dict[str, Any] | None = None, **system: Any) -> list[Check]:
        made: dict[str, Any] = {
            "system": System.fake(**{**GOOD, **system}),
            "child": Child(**{**CHILD, **(child or {})}),
            "python": (3, 11, 7),
            "settings_errors": (),
            "cache_dir": tmp_path / "cache",
            "distributions": frozenset({"nvidia-ml-py", "apache-tvm-ffi", "ninja"}),
        }
        return doctor.diagnose(Facts(**{**made, **(facts or {})}))

    return run


def only(checks: list[Check]) -> Check:
    """Return the one outcome that is not fine."""
    (check,) = [check for check in checks if check.status not in ("ok", "skip")]
    return check


def test_a_healthy_machine(examine: Any) -> None:
    checks = examine()
    assert [check for check in checks if check.status not in ("ok", "skip")] == []
    assert len(checks) >= len(CHECKS) == 16
    assert next(c for c in checks if c.name == "nvcc").text.endswith("builds for sm_120")


NO_GPU: dict[str, Any] = {"arch": None, "driver": None, "driver_cuda": None}

CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("self-check", "fail", "is NaN", {"child": {"verdicts": (Kept("cudnn", "failed", "a tile is NaN"),)}}),
    ("self-check", "fail", "OSError: no", {"child": {"verdicts_error": "OSError: no"}}),
    ("python", "fail", "3.9.1", {"facts": {"python": (3, 9, 1)}}),
    ("torch", "fail", "undefined symbol", {"child": {"error": "ImportError: undefined symbol"}}),
    ("torch CUDA", "fail", "CPU build", {"child": {"cuda": None, "archs": (), "gpus": ()}, "cuda": None}),
    ("torch CUDA", "fail", "driver too old", {"child": {"cuda_error": "the driver too old", "gpus": ()}}),
    ("torch CUDA", "warn", "CUDA sees 12.0, 9.0", {"child": {"gpus": ("12.0", "9.0")}}),
    ("torch archs", "fail", "no code for sm_120", {"child": {"archs": ("sm_90", "sm_100a")}}),
    ("driver", "fail", "built for 13.0", {"driver_cuda": "12.8"}),
    ("driver", "warn", "built for 13.1", {"driver_cuda": "13.0", "cuda": "13.1"}),
    ("gpu", "warn", "sm_130, is not known", {"arch": "13.0", "child": {"gpus": ("13.0",), "archs": ()}}),
    ("gpu", "warn", "NVML does not", {**NO_GPU, "child": {"gpus": ("11.0",), "archs": ()}}),
    ("cudnn", "warn", "not found", {"cudnn": None, "cudnn_frontend": None}),
    ("cudnn", "warn", "needs 9.19 here", {"cudnn": "9.7.1"}),
    ("cudnn", "warn", "does not tell", {"cudnn": ""}),
    ("cudnn frontend", "warn", "not installed", {"cudnn_frontend": None}),
    ("nvcc", "warn", "not found", {"nvcc": None}),
    ("nvcc", "fail", "cannot build for sm_120 (needs 12.9)", {"nvcc": "11.5.119"}),
    ("nvcc", "fail", "leads to /none", {"nvcc": None, "notes": ["nvcc: CUDA_HOME leads to /none, which is not"]}),
    ("jit packages", "warn", "ninja", {"facts": {"distributions": frozenset({"nvidia-ml-py", "apache-tvm-ffi"})}}),
    ("cutlass headers", "warn", "not found", {"cutlass": None}),
    ("settings", "fail", "MAX_JOBS", {"facts": {"settings_errors": ("MAX_JOBS='x' is not a number",)}}),
    (
        "settings",
        "warn",
        "FP4DISPATCH_X",
        {"facts": {"settings_errors": ("FP4DISPATCH_X is set but is not a setting",)}},
    ),
    (
        "nvidia-ml-py",
        "warn",
        "deprecated",
        {"facts": {"distributions": frozenset({"nvidia-ml-py", "pynvml", "apache-tvm-ffi", "ninja"})}},
    ),
    ("nvidia-ml-py", "warn", "not installed", {"facts": {"distributions": frozenset({"apache-tvm-ffi", "ninja"})}}),
    ("plug-ins", "fail", "mine cannot", {"child": {"plugins": {"mine": "mine cannot be loaded: boom", "fine": None}}}),
    (
        "kernels",
        "warn",
        "3 kernels are ignored: built by another",
        {"facts": {"kernels": (Report(Package("a-wheel", "1.0", None), (), {"built by another": 3}),)}},
    ),
    ("visible devices", "warn", "listed", {"notes": ["CUDA_VISIBLE_DEVICES='0,0': '0' names a GPU that is listed"]}),
    ("visible devices", "warn", "MIG mode", {"notes": ["NVIDIA H200 is in MIG mode: CUDA shows one MIG device only"]}),
    ("visible devices", "warn", "different GPUs", {"notes": ["different GPUs in one machine: CUDA's order"]}),
]


@pytest.mark.parametrize(("name", "status", "words", "changes"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_one_fault_is_one_finding_with_a_fix(
    examine: Any, name: str, status: str, words: str, changes: dict[str, Any]
) -> None:
    check = only(examine(**changes))
    assert (check.name, check.status) == (name, status)
    assert words in check.text
    assert check.fix


def test_every_check_is_exercised_by_a_fault() -> None:
    """Each check but the driver-independent listing has a case above or below that makes it complain."""
    names = {name.split()[0] for name, *_ in CASES} | {"flashinfer", "cache"}
    checks = {check.__name__.removeprefix("check_").split("_")[0] for check in CHECKS}
    assert {"plug-ins": "plugins", "nvidia-ml-py": "nvml"}.keys() <= names
    renamed = {
        {"plug-ins": "plugins", "nvidia-ml-py": "nvml", "self-check": "selfcheck"}.get(name, name) for name in names
    }
    assert renamed == checks


@pytest.mark.parametrize(("allowed", "words"), [(False, "not allowed"), (True, "allowed, w4a8_expanded")])
def test_the_fp8_copy_is_mentioned_where_it_can_run(examine: Any, allowed: bool, words: str) -> None:
    def found(arch: str) -> list[Check]:
        return [c for c in examine(facts={"values": {"fp8_copy": allowed}}, arch=arch) if "FP8 copy" in c.text]

    (check,) = found("9.0")
    assert (check.name, check.status) == ("settings", "ok")
    assert words in check.text
    assert ("FP4DISPATCH_FP8_COPY=1" in check.fix) is not allowed
    assert found("12.0") == []


def test_the_setting_of_the_fp8_copy_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_child", lambda: Child(**CHILD))
    for value, allowed in (("1", True), ("0", False), ("perhaps", False)):
        monkeypatch.setenv("FP4DISPATCH_FP8_COPY", value)
        facts = doctor.gather()
        assert facts.fp8_copy is allowed
        assert any("perhaps" in error for error in facts.settings_errors) is (value == "perhaps")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fp4_gemm_backend": "cutlas"}, "FP4_GEMM_BACKEND='cutlas' is not a backend. Did you mean cutlass?"),
        ({"fp8_backend": "w8a9"}, "FP4DISPATCH_FP8_BACKEND='w8a9' is not a backend. Did you mean w8a8?"),
        ({"fp4_gemm_backend": "w8a8"}, "w8a8 never runs nvfp4_gemm"),
        ({"fp8_backend": "marlin"}, "w4a16 never runs fp8_gemm"),
        ({"disable": ("cudn",)}, "FP4DISPATCH_DISABLE: 'cudn' is not a backend. Did you mean cudnn?"),
        ({"disable": ("auto",)}, "auto is no backend"),
        ({"fp4_gemm_backend": "marlin", "disable": ("w4a16",)}, "that FP4DISPATCH_DISABLE forbids"),
        ({"arch": "13.7"}, "FP4DISPATCH_ARCH='13.7': 13.7 is not the capability of a GPU"),
        ({"arch": "120f"}, "FP4DISPATCH_ARCH='120f'"),
        ({"nvcc": Path("/no/such/nvcc")}, "FP4DISPATCH_NVCC='/no/such/nvcc': there is no such file"),
        ({"cuda_home": Path("/no/such")}, "CUDA_HOME='/no/such': there is no such folder"),
        ({"cutlass_path": Path("/no/such")}, "CUTLASS_PATH='/no/such': there is no such folder"),
        ({"cuda_device_order": "SLOWEST"}, "CUDA_DEVICE_ORDER='SLOWEST' is not known"),
    ],
)
def test_a_value_that_means_nothing_is_a_finding(examine: Any, values: dict[str, Any], words: str) -> None:
    check = only(examine(facts={"values": values}))
    assert (check.name, check.status) == ("settings", "fail")
    assert words in check.text
    assert check.fix


@pytest.mark.parametrize(
    "values",
    [
        {
            "fp4_gemm_backend": "auto",
            "fp8_backend": "Flashinfer-cuDNN",
            "disable": ("marlin", "cutlass"),
            "arch": "12.0",
        },
        {"fp4_gemm_backend": "theirs", "disable": ("theirs_too",), "arch": "sm_90"},
    ],
)
def test_values_that_mean_something_are_fine(examine: Any, values: dict[str, Any]) -> None:
    checks = examine(facts={"values": values}, child={"plugins": {"theirs": None, "theirs_too": None}})
    assert [c.text for c in checks if c.name == "settings"] == ["all understood"]


def test_every_setting_of_ours_is_looked_at() -> None:
    """Each is parsed strictly, or what it says is checked further; the rest are texts that cannot be wrong."""
    free = {"cuda_visible_devices", "no_color"}  # the first is checked by `visible devices`, the second takes anything
    further = {"fp4_gemm_backend", "fp8_backend", "disable", "arch", "nvcc", "cuda_home", "cutlass_path"}
    strict = {"pdl", "selfcheck", "tuned", "fp8_copy", "nvtx", "jit", "log", "max_jobs", "cache_dir", "xdg_cache_home"}
    assert set(SETTINGS) == free | further | strict | {"cuda_device_order"}
    for key in strict:
        with pytest.raises(SettingsError):
            SETTINGS[key].parse(SETTINGS[key].name, "~no_such_user_here/\0")


def test_absent_torch(examine: Any) -> None:
    check = only(examine(torch=None, child={"error": "ModuleNotFoundError: No module named 'torch'"}))
    assert (check.name, check.status, check.text) == ("torch", "fail", "not installed")


def test_a_machine_without_gpu_is_fine(examine: Any) -> None:
    checks = examine(
        **NO_GPU, cuda=None, torch="2.13.0+cpu", cudnn=None, cudnn_frontend=None, notes=["NVML: no NVIDIA driver here"],
        child={"cuda": None, "archs": (), "gpus": ()},
    )  # fmt: skip
    assert {check.status for check in checks} == {"ok", "skip"}


@pytest.mark.parametrize(
    ("version", "arch", "source"),
    [
        ("0.6.4", "12.0", "flashinfer/issues/2708"),
        ("0.6.6", "10.0", "flashinfer/issues/2708"),
        ("0.6.8", "12.1", "flashinfer/pull/3192"),
    ],
)
def test_flashinfer_incidents_come_from_the_policys_rules(examine: Any, version: str, arch: str, source: str) -> None:
    checks = examine(flashinfer=version, arch=arch, child={"gpus": (arch,), "archs": ()})
    found = [check for check in checks if check.name == "flashinfer"]
    assert any(source in check.text and check.status == "warn" and check.fix for check in found)


def test_flashinfer_after_the_fix(examine: Any) -> None:
    fixed = [check for check in examine(flashinfer="0.6.7") if check.name == "flashinfer"]
    assert not any("issues/2708" in check.text for check in fixed)
    (check,) = [check for check in examine(flashinfer="0.7.2") if check.name == "flashinfer"]
    assert check.status == "ok"


def test_a_second_cudnn_on_the_library_path(examine: Any, tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.9").touch()
    check = only(examine(facts={"library_path": f":{tmp_path}"}))
    assert (check.name, check.status) == ("cudnn", "warn")
    assert str(tmp_path) in check.text
    same = examine(facts={"library_path": str(tmp_path)}, cudnn_path=str(tmp_path / "libcudnn.so.9"))
    assert {check.status for check in same} == {"ok", "skip"}


class TestCache:
    @staticmethod
    def check(examine: Any, folder: Path) -> Check:
        (check,) = [check for check in examine(facts={"cache_dir": folder}) if check.name == "cache"]
        return check

    def test_not_there_yet(self, examine: Any, tmp_path: Path) -> None:
        check = self.check(examine, tmp_path / "a" / "b")
        assert check.status == "ok"
        assert "made when needed" in check.text
        assert not (tmp_path / "a").exists()

    def test_private(self, examine: Any, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir(mode=0o700)
        assert self.check(examine, tmp_path / "cache") == Check("cache", "ok", str(tmp_path / "cache"))

    @pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
    def test_writable_by_others(self, examine: Any, tmp_path: Path, mode: int) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(mode)
        check = self.check(examine, tmp_path / "cache")
        assert check.status == "fail"
        assert f"{mode:o}" in check.text
        assert "chmod" in check.fix

    @pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")
    def test_of_another_user(self, examine: Any, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir(mode=0o700)
        os.chown(tmp_path / "cache", 12345, -1)
        if os.geteuid() == (tmp_path / "cache").stat().st_uid:
            pytest.skip("this file system keeps no owners")
        check = self.check(examine, tmp_path / "cache")
        assert check.status == "fail"
        assert "12345" in check.text

    def test_a_file(self, examine: Any, tmp_path: Path) -> None:
        (tmp_path / "cache").touch()
        assert self.check(examine, tmp_path / "cache").status == "fail"

    def test_read_only(self, examine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(state.os, "access", lambda *args: False)
        check = self.check(examine, tmp_path)
        assert check.status == "warn"
        assert "read-only" in check.text


@pytest.mark.parametrize(
    ("built", "gpu", "runs"),
    [
        ("sm_90", "9.0", True),
        ("sm_80", "8.6", True),
        ("sm_86", "8.0", False),
        ("sm_90a", "9.0", True),
        ("sm_100a", "10.3", False),
        ("sm_100f", "10.3", True),
        ("sm_120", "12.1", True),
        ("sm_100", "12.0", False),
        ("sm_90", "10.0", False),
        ("compute_90", "12.0", True),
        ("compute_120", "9.0", False),
        ("compute_90a", "10.0", False),
        ("compute_100f", "12.0", False),
    ],
)
def test_which_code_runs_where(built: str, gpu: str, runs: bool) -> None:
    arch = System.fake(arch=gpu).arch
    assert arch is not None
    assert gpus.runs_on(built, arch) is runs


def test_a_check_that_breaks_stops_no_other(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken(facts: Facts) -> list[Check]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(doctor, "CHECKS", (check_broken, *CHECKS))
    checks = examine()
    assert checks[0] == Check("broken", "fail", "the check itself failed: ZeroDivisionError: oops", checks[0].fix)
    assert len(checks) > len(CHECKS)


class TestOutput:
    CHECKS = (Check("a", "ok", "fine"), Check("b", "warn", "hmm", "do this"), Check("c", "skip", "no"))

    @pytest.fixture(autouse=True)
    def canned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "gather", lambda: None)
        monkeypatch.setattr(doctor, "diagnose", lambda facts: list(self.CHECKS))

    def test_plain(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["ok", "a", "fine"]
        assert lines[2].strip() == "-> do this"

    def test_json_and_exit_code(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        assert cli.main(["doctor", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["ok"] is True
        assert data["checks"][1] == {"name": "b", "status": "warn", "text": "hmm", "fix": "do this"}
        monkeypatch.setattr(doctor, "diagnose", lambda facts: [Check("d", "fail", "bad", "mend it")])
        assert cli.main(["doctor", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["ok"] is False
        assert cli.main(["doctor"]) == 1

    @pytest.mark.parametrize(
        ("no_color", "rich", "coloured"), [("", True, True), ("1", True, False), ("", False, False)]
    )
    def test_colours_on_a_terminal_only(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        no_color: str,
        rich: bool,
        coloured: bool,
    ) -> None:
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        real = builtins.__import__

        def without_rich(name: str, *args: Any) -> Any:
            if name.startswith("rich"):
                raise ImportError(name)
            return real(name, *args)

        if not rich:
            monkeypatch.setattr(builtins, "__import__", without_rich)
        assert cli.main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert ("\x1b[" in out) is coloured
        assert "do this" in out


class TestForReal:
    """The command itself, in processes whose torch is broken in different ways."""

    @staticmethod
    def doctor(tmp_path: Path, torch: str | None, *options: str, **extra: str) -> tuple[int, dict[str, dict[str, str]]]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **extra}
        environment.pop("FP4DISPATCH_CACHE_DIR", None)
        root = str(Path(fp4dispatch.__file__).parents[1])
        if torch is not None:
            (tmp_path / "fake" / "torch").mkdir(parents=True)
            (tmp_path / "fake" / "torch" / "__init__.py").write_text(torch)
            (tmp_path / "fake" / "torch" / "version.py").write_text("__version__ = '9.9.9'\ncuda = '13.0'\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "fake"), root])
        done = subprocess.run(
            [sys.executable, *options, "-m", "fp4dispatch", "doctor", "--json"],
            capture_output=True, text=True, check=False, env=environment, timeout=300, cwd=tmp_path,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}

    def test_here(self, tmp_path: Path) -> None:
        _, checks = self.doctor(tmp_path, None)
        assert checks["torch"]["status"] == "ok"
        assert checks["settings"]["status"] == "ok"

    @pytest.mark.parametrize(
        ("torch", "words"),
        [
            ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
            ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "status -11"),
            ("import sys\nsys.exit(7)", "status 7"),
        ],
    )
    def test_broken_torch(self, tmp_path: Path, torch: str, words: str) -> None:
        code, checks = self.doctor(tmp_path, torch)
        assert code == 1
        assert checks["torch"]["status"] == "fail"
        assert "9.9.9 cannot be imported" in checks["torch"]["text"]
        assert words in checks["torch"]["text"]
        assert checks["torch"]["fix"]
        assert checks["plug-ins"]["status"] == "skip"
        assert checks["self-check"]["status"] == "skip"
        assert checks["python"]["status"] == "ok"

    def test_wrong_settings_and_a_broken_plugin(self, tmp_path: Path) -> None:
        info = tmp_path / "fake" / "someone-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[fp4dispatch.backends]\ntheirs = someone_backend:Backend\n")
        (tmp_path / "fake" / "someone_backend.py").write_text("raise RuntimeError('half built')\n")
        code, checks = self.doctor(tmp_path, None, MAX_JOBS="many", FP4DISPATCH_BACKND="x")
        assert code == 1
        assert "half built" in checks["plug-ins"]["text"]
        assert checks["plug-ins"]["status"] == "fail"
        assert "FP4DISPATCH_BACKND" in checks["settings"]["text"]  # the later of two findings of one name

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("import atexit\natexit.register(print, 'bye')\n", ""),
            ("import sys\nsys.stdout.buffer.write(bytes([255]))\n", ""),
            ("import os\nos._exit(0)\n", "ended the process with status 0"),
            ("import os\nos.abort()\n", "ended the process with status -6"),
            ("raise KeyboardInterrupt\n", "ended the process with status"),
        ],
    )
    def test_a_plugin_that_prints_or_ends_the_process(self, tmp_path: Path, source: str, words: str) -> None:
        info = tmp_path / "fake" / "someone-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[fp4dispatch.backends]\ntheirs = someone_backend:Backend\n")
        (tmp_path / "fake" / "someone_backend.py").write_text(source)
        code, checks = self.doctor(tmp_path, None)
        assert code == 1
        assert checks["torch"]["status"] == "ok"
        assert checks["plug-ins"]["status"] == "fail"
        assert "theirs" in checks["plug-ins"]["text"]
        assert words in checks["plug-ins"]["text"]
        assert checks["self-check"]["status"] == ("skip" if words else checks["self-check"]["status"])

    @pytest.mark.parametrize("variable", ["FP4DISPATCH_NVCC", "CUDA_HOME", "CUTLASS_PATH", "FP4DISPATCH_SELFCHECK"])
    def test_a_value_that_cannot_be_parsed_ends_no_other_check(self, tmp_path: Path, variable: str) -> None:
        code, checks = self.doctor(tmp_path, None, **{variable: "~no_such_user_here/x"})
        assert code == 1
        assert variable in checks["settings"]["text"]
        assert checks["torch"]["status"] == "ok"
        assert checks["self-check"]["status"] in ("ok", "skip")

    def test_misspelt_backends(self, tmp_path: Path) -> None:
        code, checks = self.doctor(tmp_path, None, FP4_GEMM_BACKEND="cutlas")
        assert code == 1
        assert "Did you mean cutlass?" in checks["settings"]["text"]

    def test_a_torch_that_hangs_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert doctor.ask_child(timeout=3).error == "importing torch did not finish within 3 s"

    def test_a_plugin_that_hangs_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = json.dumps({"cuda": None, "archs": [], "gpus": [], "plugins": {}, "loading": ["theirs"]})
        monkeypatch.setattr(
            doctor, "_CHILD", f"import sys, time; print(sys.argv[2] + {told!r}, flush=True); time.sleep(60)"
        )
        found = doctor.ask_child(timeout=3)
        assert found.error is None
        assert found.plugins_error == "theirs: loading them did not finish within 3 s"

    def test_a_python_that_cannot_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        assert "cannot be started" in str(doctor.ask_child().error)
