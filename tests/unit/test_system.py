"""System: fakes, probing of libraries, caching, and the hand-over to CUDA's own list of GPUs."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch.errors import InputError
from fp4dispatch.machine import libraries, nvml, system
from fp4dispatch.machine.system import Gpu, Library, System
from fp4dispatch.problem.arch import SM90, SM100, SM120


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Start without probed facts and without the hooks of other modules; leave both as they were."""
    hooks = {"proven": system._proven, "finished": system._finished, "quarantined": system._quarantined}
    system.refresh()
    system.provide(proven=frozenset, finished=frozenset, quarantined=frozenset)
    yield
    system.refresh()
    system.provide(**hooks)


class TestFake:
    def test_nothing_named_is_nothing_there(self) -> None:
        assert System.fake() == System()
        assert System.fake().arch is None
        assert str(System.fake()) == "no GPU"

    def test_everything(self) -> None:
        fake = System.fake(
            arch="12.0",
            driver="580.65",
            driver_cuda="13.0",
            cuda="12.8",
            torch="2.13.0+cu128",
            cudnn="9.7.1",
            cudnn_path="/usr/lib",
            cudnn_frontend="1.14",
            flashinfer="0.6.4",
            cutlass="4.5.0",
            nvcc="12.9.86",
            proven=[("nvfp4_gemm", "sm_120")],
            quarantined=[("cutlass", "nvfp4_gemm", "sm_120")],
            notes=["a note"],
        )
        assert fake.arch == SM120
        assert fake.cudnn == Library("9.7.1", "/usr/lib")
        assert str(fake) == "sm_120 (CUDA 12.8, cuDNN 9.7.1, FlashInfer 0.6.4, CUTLASS 4.5.0, nvcc 12.9.86)"
        assert hash(fake) == hash(System(**{name: getattr(fake, name) for name in System.__dataclass_fields__}))
        data = json.loads(json.dumps(fake.to_dict()))
        assert data["arch"] == "12.0"
        assert data["gpus"][0]["arch"] == "12.0"
        assert data["torch"] == {"version": "2.13.0+cu128", "path": ""}
        assert data["proven"] == [["nvfp4_gemm", "sm_120"]]
        assert data["quarantined"] == [["cutlass", "nvfp4_gemm", "sm_120"]]
        assert data["notes"] == ["a note"]
        left_out = {"fp8_copy", "finished"}  # a setting, and a long list
        assert set(data) == {*System.__dataclass_fields__, "arch"} - left_out
        assert str(System.fake("9.0", fp8_copy=True)) == "sm_90 (FP8 copy allowed)"

    @pytest.mark.parametrize("arch", ["sm_90", "9.0", SM90])
    def test_spellings_of_an_arch(self, arch: Any) -> None:
        assert System.fake(arch).arch == SM90

    def test_several_gpus(self) -> None:
        assert [g.arch for g in System.fake("9.0", gpus=3).gpus] == [SM90] * 3
        assert [g.arch for g in System.fake(gpus=["10.0", SM90]).gpus] == [SM100, SM90]
        assert [g.index for g in System.fake("9.0", gpus=2).gpus] == [0, 1]
        assert System.fake("9.0", gpus=0).gpus == ()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"arch": "120f"},
            {"arch": "12"},
            {"cuda": "twelve"},
            {"cudnn": "9.10.2; rm"},
            {"nvcc": "v12.9"},
            {"gpus": 2},
            {"arch": "9.0", "gpus": -1},
            {"arch": "9.0", "gpus": ["9.0"]},
            {"gpus": "9.0"},
        ],
    )
    def test_strict_about_values(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InputError):
            System.fake(**wrong)

    @pytest.mark.parametrize("name", ["cudn", "gpu", "sm", "Cuda"])
    def test_strict_about_names(self, name: str) -> None:
        with pytest.raises(TypeError, match=name):
            System.fake(**{name: "9.0"})

    def test_a_library_may_be_there_without_a_version(self) -> None:
        assert System.fake(cudnn="").cudnn == Library("")


class TestCurrent:
    def test_is_probed_once_for_all_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        probes: list[int] = []

        def probe() -> nvml.Found:
            probes.append(1)
            return nvml.Found(driver="580")

        monkeypatch.setattr(nvml, "probe", probe)
        seen: list[System] = []
        threads = [threading.Thread(target=lambda: seen.append(system.current())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(probes) == 1
        assert len(seen) == 8
        assert all(one is seen[0] for one in seen)
        assert seen[0].driver == "580"

    def test_providers_are_asked_each_time(self) -> None:
        proofs: set[tuple[str, str]] = set()
        system.provide(proven=lambda: frozenset(proofs), quarantined=lambda: frozenset({("a", "b", "c")}))
        assert system.current().proven == frozenset()
        assert system.current().quarantined == {("a", "b", "c")}
        proofs.add(("nvfp4_gemm", "sm_120"))
        assert system.current().proven == {("nvfp4_gemm", "sm_120")}
        assert system.current() is system.current()
        built = {("w4a8_small", "bf16", "sm_90")}
        system.provide(finished=lambda: frozenset(built))
        assert system.current().finished == built
        built.add(("w4a8_small", "fp16", "sm_90"))
        assert system.current().finished == built
        system.provide(proven=frozenset)
        assert system.current().proven == frozenset()
        assert system.current().quarantined == {("a", "b", "c")}
        system.provide(quarantined=lambda: frozenset({("d", "e", "f")}))
        assert system.current().quarantined == {("d", "e", "f")}

    def test_cuda_corrects_the_list_once_it_is_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = (Gpu(0, "fast", "GPU-1", SM100), Gpu(1, "slow", "GPU-2", SM120))
        monkeypatch.setattr(nvml, "probe", lambda: nvml.Found(gpus=expected))
        up = fake_cuda(monkeypatch, [("slow", 12, 0, "2"), ("fast", 10, 0, "1")])
        before = system.current()
        assert before.gpus == expected
        up.append(True)
        after = system.current()
        assert [(g.index, g.name, g.uuid, g.arch) for g in after.gpus] == [
            (0, "slow", "GPU-2", SM120),
            (1, "fast", "GPU-1", SM100),
        ]
        assert any("otherwise than NVML" in note for note in after.notes)
        assert system.current() is after

    def test_cuda_finds_gpus_where_nvml_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "probe", lambda: nvml.Found(notes=("NVML: none",)))
        up = fake_cuda(monkeypatch, [("Thor", 11, 0, "1")])
        up.append(True)
        assert system.current().arch is not None
        assert str(system.current().arch) == "sm_110"

    def test_agreement_makes_no_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvml, "probe", lambda: nvml.Found(gpus=(Gpu(0, "H200", "GPU-1", SM90),)))
        up = fake_cuda(monkeypatch, [("NVIDIA H200", 9, 0, "1")])
        up.append(True)
        assert not any("otherwise" in note for note in system.current().notes)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, devices: list[tuple[str, int, int, str]]) -> list[bool]:
    """Put a torch with these devices in sys.modules; append True to the result to initialise it."""
    up: list[bool] = []

    def properties(i: int) -> Any:
        name, major, minor, uuid = devices[i]
        return types.SimpleNamespace(name=name, major=major, minor=minor, uuid=uuid, total_memory=1)

    cuda = types.SimpleNamespace(
        is_initialized=lambda: bool(up), device_count=lambda: len(devices), get_device_properties=properties
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    # find_spec refuses a module without __spec__; the libraries of this machine do not matter here
    monkeypatch.setattr(libraries, "torch_version", lambda: (Library("2.13.0"), "13.0"))
    return up


class TestTorchVersion:
    def test_reads_the_text_and_runs_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = package(tmp_path, "torch", "raise SystemExit('torch was imported')")
        (folder / "version.py").write_text(
            "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
        )
        use(monkeypatch, tmp_path, "torch")
        assert libraries.torch_version() == (Library("2.13.0+cu130", str(folder)), "13.0")

    def test_a_cpu_build_has_no_cuda(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = package(tmp_path, "torch")
        (folder / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: None = None\nhip = None\n")
        use(monkeypatch, tmp_path, "torch")
        assert libraries.torch_version() == (Library("2.13.0+cpu", str(folder)), None)

    @pytest.mark.parametrize("text", ["def (", "\0", None])
    def test_a_damaged_install_falls_back_to_metadata(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
    ) -> None:
        folder = package(tmp_path, "torch")
        if text is not None:
            (folder / "version.py").write_text(text)
        metadata(tmp_path, "torch", "2.12.1")
        use(monkeypatch, tmp_path, "torch")
        assert libraries.torch_version() == (Library("2.12.1", str(folder)), None)

    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        assert libraries.torch_version() == (None, None)

    def test_agrees_with_the_imported_torch(self) -> None:
        import torch

        found, cuda = libraries.torch_version()
        assert found == Library(torch.__version__, str(Path(torch.__file__).parent))
        assert cuda == torch.version.cuda


def package(root: Path, name: str, text: str = "") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    return folder


def metadata(root: Path, name: str, version: str) -> None:
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def use(monkeypatch: pytest.MonkeyPatch, root: Path, *names: str) -> None:
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(root))


class TestCudnn:
    MAPS = (
        "7f0000-7f1000 r-xp 00000000 08:01 123    /opt/x/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f1000-7f2000 r--p 00000000 08:01 123    /opt/x/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f2000-7f3000 r-xp 00000000 08:01 124    /opt/x/nvidia/cudnn/lib/libcudnn_graph.so.9\n"
        "7f3000-7f4000 rw-p 00000000 00:00 0\n"
        "7f4000-7f5000 r-xp 00000000 08:01 125    /usr/lib/a b/libcudnn.so.9.7.1\n"
    )

    def test_memory_map(self) -> None:
        assert libraries.loaded_cudnn(self.MAPS) == [
            "/opt/x/nvidia/cudnn/lib/libcudnn.so.9",
            "/usr/lib/a b/libcudnn.so.9.7.1",
        ]
        assert libraries.loaded_cudnn("") == []

    @pytest.mark.parametrize(
        ("number", "text"), [(91002, "9.10.2"), (90100, "9.1.0"), (92301, "9.23.1"), (8907, "8.9.7"), (8005, "8.0.5")]
    )
    def test_number(self, number: int, text: str) -> None:
        assert libraries.cudnn_number(number) == text

    def test_the_loaded_library_wins_and_two_are_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "_memory_map", lambda: self.MAPS)
        monkeypatch.setattr(libraries, "_loaded_version", lambda path: "9.10.2")
        found, notes = libraries.cudnn("13.0")
        assert found == Library("9.10.2", "/opt/x/nvidia/cudnn/lib/libcudnn.so.9")
        assert len(notes) == 1
        assert "several" in notes[0]

    def test_a_library_that_is_not_loaded_is_not_loaded_to_ask_it(self) -> None:
        assert libraries._loaded_version("/nowhere/libcudnn.so.9") is None

    @pytest.mark.parametrize(("cuda", "version"), [("13.0", "9.23.1"), ("12.8", "9.10.2")])
    def test_the_wheel_of_torchs_cuda(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, version: str
    ) -> None:
        library = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
        library.parent.mkdir(parents=True)
        library.touch()
        metadata(tmp_path, "nvidia-cudnn-cu13", "9.23.1.3")
        metadata(tmp_path, "nvidia-cudnn-cu12", "9.10.2.21")
        use(monkeypatch, tmp_path, "nvidia")
        monkeypatch.setattr(libraries, "package_folder", lambda name: tmp_path / name)
        monkeypatch.setattr(libraries, "_memory_map", lambda: "")
        found, notes = libraries.cudnn(cuda)
        assert found == Library(version, str(library))
        assert "overwrite each other" in notes[0]

    def test_the_distributions_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "libcudnn.so.9.7.1").touch()
        (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.7.1")
        monkeypatch.setattr(libraries, "_SYSTEM_LIBRARIES", (str(tmp_path / "none"), str(tmp_path)))
        monkeypatch.setattr(libraries, "package_folder", lambda name: None)
        monkeypatch.setattr(libraries, "_metadata_version", lambda name: None)
        found, _ = libraries.cudnn(None)
        assert found == Library("9.7.1", str(tmp_path / "libcudnn.so.9"))

    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libraries, "_SYSTEM_LIBRARIES", (str(tmp_path),))
        monkeypatch.setattr(libraries, "_metadata_version", lambda name: None)
        assert libraries.cudnn("13.0") == (None, ())


class TestNvcc:
    @pytest.fixture(autouse=True)
    def bare(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("FP4DISPATCH_NVCC", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(libraries, "package_folder", lambda name: None)

    @staticmethod
    def compiler(folder: Path, release: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "nvcc"
        major_minor = ".".join(release.split(".")[:2])
        file.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {major_minor}, V{release}'\n")
        file.chmod(0o755)
        return file

    def test_none(self) -> None:
        assert libraries.nvcc() == (None, ())

    def test_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = self.compiler(tmp_path / "bin", "11.5.119")
        monkeypatch.setenv("PATH", str(file.parent))
        assert libraries.nvcc() == (Library("11.5.119", str(file)), ())

    def test_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = self.compiler(tmp_path / "site" / "nvidia" / "cu13" / "bin", "13.3.1")
        monkeypatch.setattr(libraries, "package_folder", lambda name: tmp_path / "site" / name)
        assert libraries.nvcc()[0] == Library("13.3.1", str(wheel))
        monkeypatch.setenv("PATH", str(self.compiler(tmp_path / "path", "11.5.119").parent))
        assert libraries.nvcc()[0].version == "11.5.119"
        monkeypatch.setenv("CUDA_HOME", str(self.compiler(tmp_path / "home" / "bin", "12.9.86").parent.parent))
        assert libraries.nvcc()[0].version == "12.9.86"
        monkeypatch.setenv("FP4DISPATCH_NVCC", str(self.compiler(tmp_path / "own", "13.0.88")))
        assert libraries.nvcc()[0].version == "13.0.88"

    @pytest.mark.parametrize("name", ["FP4DISPATCH_NVCC", "CUDA_HOME"])
    def test_a_wrong_variable_is_never_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv("PATH", str(self.compiler(tmp_path / "path", "13.0.88").parent))
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
        found, notes = libraries.nvcc()
        assert found is None
        assert notes[0].startswith(f"nvcc: {name} leads to ")

    @pytest.mark.parametrize(
        ("name", "value"), [("FP4DISPATCH_NVCC", "cuda/bin/nvcc"), ("CUDA_HOME", "cuda"), ("PATH", "cuda/bin")]
    )
    def test_a_relative_path_is_made_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
    ) -> None:
        """Compilers are started in another folder."""
        file = self.compiler(tmp_path / "cuda" / "bin", "13.0.88")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(name, value)
        assert libraries.nvcc() == (Library("13.0.88", str(file)), ())

    def test_a_compiler_that_says_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "nvcc"
        file.write_text("#!/bin/sh\nexit 3\n")
        file.chmod(0o755)
        monkeypatch.setenv("FP4DISPATCH_NVCC", str(file))
        found, notes = libraries.nvcc()
        assert found is None
        assert "does not tell its version" in notes[0]
        file.write_text("not a program")
        assert libraries.nvcc()[0] is None
        file.write_bytes(b"#!/bin/sh\necho '\xff release 13.0, V13.0'\n")
        assert libraries.nvcc()[0] is None

    @pytest.mark.parametrize("version", ['"unknown"', "null", "13", "[]"])
    def test_an_inventory_without_a_version(
        self, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = self.compiler(tmp_path / "cuda" / "bin", "13.0.88")
        (tmp_path / "cuda" / "version.json").write_text(f'{{"cuda_nvcc": {{"version": {version}}}}}')
        monkeypatch.setenv("FP4DISPATCH_NVCC", str(file))
        assert libraries.nvcc()[0] == Library("13.0.88", str(file))

    def test_the_toolkits_inventory_needs_no_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = self.compiler(tmp_path / "cuda" / "bin", "1.2.3")
        (tmp_path / "cuda" / "version.json").write_text('{"cuda_nvcc": {"version": "12.9.86"}}')
        monkeypatch.setenv("FP4DISPATCH_NVCC", str(file))
        assert libraries.nvcc()[0].version == "12.9.86"
        (tmp_path / "cuda" / "version.json").write_text("{")
        assert libraries.nvcc()[0].version == "1.2.3"


class TestCutlass:
    HEADER = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 5\n#define CUTLASS_PATCH 0\n"

    def test_path_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "include" / "cutlass" / "version.h"
        file.parent.mkdir(parents=True)
        file.write_text(self.HEADER)
        monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
        assert libraries.cutlass() == Library("4.5.0", str(tmp_path))
        file.write_text("nothing here")
        assert libraries.cutlass() is None

    def test_flashinfers_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUTLASS_PATH", raising=False)
        file = tmp_path / "flashinfer" / "data" / "cutlass" / "include" / "cutlass" / "version.h"
        file.parent.mkdir(parents=True)
        file.write_text(self.HEADER)
        monkeypatch.setattr(libraries, "package_folder", lambda name: tmp_path / name)
        assert libraries.cutlass() == Library("4.5.0", str(tmp_path / "flashinfer" / "data" / "cutlass"))
        monkeypatch.setattr(libraries, "package_folder", lambda name: None)
        assert libraries.cutlass() is None


def test_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.distribution("no-such-distribution-here", "none") is None
    folder = package(tmp_path, "somepackage", "raise SystemExit('was imported')")
    metadata(tmp_path, "some-package", "1.2.3")
    use(monkeypatch, tmp_path)
    assert libraries.distribution("some-package", "somepackage") == Library("1.2.3", str(folder))


def test_a_half_imported_package_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "halfway", types.SimpleNamespace(__spec__=None))
    assert libraries.package_folder("halfway") is None


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_memory_map_is_this_processs() -> None:
    assert os.path.realpath(sys.executable) in libraries._memory_map()
