"""Detection through NVML, with a fake ``pynvml`` module in place of the driver."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from fp4dispatch.machine import nvml
from fp4dispatch.problem.arch import SM90, SM100, SM121


class NVMLError(Exception):
    def __init__(self, value: int, text: str = "") -> None:
        super().__init__(text or f"NVML error {value}")
        self.value = value


def not_supported(*_: Any) -> Any:
    raise NVMLError(3, "Not Supported")


def fake(boards: list[dict[str, Any]], *, as_bytes: bool = False, init: Exception | None = None) -> types.ModuleType:
    """Make a module with the part of pynvml's interface that we call; handles are dicts."""
    module = types.ModuleType("pynvml")
    text = (lambda value: value.encode()) if as_bytes else (lambda value: value)
    calls: list[str] = []

    def init_nvml() -> None:
        calls.append("init")
        if init:
            raise init

    def get(key: str) -> Any:
        def read(handle: dict[str, Any], *_: Any) -> Any:
            if key not in handle:
                raise NVMLError(3, "Not Supported")
            if isinstance(handle[key], Exception):
                raise handle[key]
            return text(handle[key]) if isinstance(handle[key], str) else handle[key]

        return read

    def mig_handle(handle: dict[str, Any], i: int) -> Any:
        if handle["instances"][i] is None:
            raise NVMLError(6, "Not Found")
        return handle["instances"][i]

    def memory(handle: dict[str, Any]) -> Any:
        return types.SimpleNamespace(total=get("memory")(handle))

    vars(module).update(
        calls=calls,
        NVMLError=NVMLError,
        NVML_ERROR_NO_PERMISSION=4,
        NVML_ERROR_DRIVER_NOT_LOADED=9,
        NVML_ERROR_LIBRARY_NOT_FOUND=12,
        NVML_ERROR_LIB_RM_VERSION_MISMATCH=18,
        NVML_CLOCK_SM=1,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init_nvml,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlSystemGetDriverVersion=lambda: text("580.159.04"),
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlDeviceGetCount=lambda: len(boards),
        nvmlDeviceGetHandleByIndex=lambda i: boards[i],
        nvmlDeviceGetCudaComputeCapability=get("capability"),
        nvmlDeviceGetNumGpuCores=get("cores"),
        nvmlDeviceGetMaxClockInfo=get("clock"),
        nvmlDeviceGetMigMode=get("mig"),
        nvmlDeviceGetUUID=get("uuid"),
        nvmlDeviceGetName=get("name"),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: len(handle["instances"]),
        nvmlDeviceGetMigDeviceHandleByIndex=mig_handle,
        nvmlDeviceGetGpuInstanceId=get("gi"),
        nvmlDeviceGetComputeInstanceId=get("ci"),
    )
    return module


H200 = {"name": "NVIDIA H200", "capability": (9, 0), "memory": 141 << 30, "cores": 16896, "clock": 1980}
B200 = {"name": "NVIDIA B200", "capability": (10, 0), "memory": 180 << 30, "cores": 18944, "clock": 1965}
SPARK = {"name": "NVIDIA GB10", "capability": (12, 1), "uuid": "GPU-spark"}


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def run(module: types.ModuleType | None) -> nvml.Found:
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return nvml.probe()

    return run


@pytest.mark.parametrize("as_bytes", [False, True])
def test_one_gpu(probe: Any, as_bytes: bool) -> None:
    module = fake([{**H200, "uuid": "GPU-1"}], as_bytes=as_bytes)
    found = probe(module)
    assert found.gpus == (nvml.Gpu(0, "NVIDIA H200", "GPU-1", SM90, 141 << 30),)
    assert (found.driver, found.driver_cuda, found.notes) == ("580.159.04", "13.1", ())
    assert module.calls == ["init", "shutdown"]


def test_shared_memory_gpus_have_an_unknown_memory(probe: Any) -> None:
    (gpu,) = probe(fake([SPARK])).gpus
    assert (gpu.arch, gpu.memory) == (SM121, 0)


def test_mixed_gpus_are_ordered_by_speed_with_a_note(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake([{**H200, "uuid": "GPU-1"}, {**B200, "uuid": "GPU-2"}])
    found = probe(module)
    assert [gpu.arch for gpu in found.gpus] == [SM100, SM90]
    assert any("FASTEST_FIRST" in note for note in found.notes)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    found = probe(module)
    assert [gpu.arch for gpu in found.gpus] == [SM90, SM100]
    assert found.notes == ()


def test_visible_devices_is_read_from_the_environment(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake([{**H200, "uuid": f"GPU-{i}"} for i in range(3)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [(gpu.index, gpu.uuid) for gpu in probe(module).gpus] == [(0, "GPU-2"), (1, "GPU-0")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = probe(module)
    assert found.gpus == ()
    assert found.driver == "580.159.04"


def test_mig(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"uuid": "MIG-1", "name": "NVIDIA H200 MIG 1g.18gb", "memory": 18 << 30, "gi": 7, "ci": 0}
    two = {"uuid": "MIG-2", "gi": 8, "ci": 1}
    module = fake([{**H200, "uuid": "GPU-1", "mig": (1, 1), "instances": [None, one, two]}])
    (gpu,) = probe(module).gpus
    assert gpu == nvml.Gpu(0, "NVIDIA H200 MIG 1g.18gb", "MIG-1", SM90, 18 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-1/8/1")
    (gpu,) = probe(module).gpus
    assert gpu == nvml.Gpu(0, "NVIDIA H200", "MIG-2", SM90, 0)


def test_mig_switched_off_is_a_plain_gpu(probe: Any) -> None:
    (gpu,) = probe(fake([{**H200, "uuid": "GPU-1", "mig": (0, 0)}])).gpus
    assert gpu.uuid == "GPU-1"


def test_a_lost_gpu_is_a_note_and_the_others_stay(probe: Any) -> None:
    lost = {**H200, "uuid": "GPU-1", "capability": NVMLError(15, "GPU is lost")}
    found = probe(fake([lost, {**H200, "uuid": "GPU-2"}]))
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-2"]
    assert found.notes == ("NVML: GPU 0 cannot be read (GPU is lost)",)


def test_a_driver_without_gpus(probe: Any) -> None:
    found = probe(fake([]))
    assert found.gpus == ()
    assert "no GPU" in found.notes[0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (12, "not installed"),
        (9, "not loaded"),
        (18, "reboot"),
        (4, "permission"),
        (999, "some other failure"),
    ],
)
def test_init_failures_are_notes(probe: Any, code: int, words: str) -> None:
    module = fake([], init=NVMLError(code, "some other failure"))
    found = probe(module)
    assert (found.gpus, found.driver) == ((), None)
    assert len(found.notes) == 1
    assert words in found.notes[0]
    assert module.calls == ["init"]


def test_pynvml_is_not_installed(probe: Any) -> None:
    found = probe(None)  # None in sys.modules makes the import fail
    assert found.gpus == ()
    assert "nvidia-ml-py" in found.notes[0]


def test_pynvml_breaks_on_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("raise RuntimeError('half an update')")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = nvml.probe()
    assert found.gpus == ()
    assert "half an update" in found.notes[0]


def test_a_library_that_answers_nothing(probe: Any) -> None:
    module = fake([])
    for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetCount"):
        setattr(module, name, not_supported)
    found = probe(module)
    assert (found.gpus, found.driver, found.driver_cuda) == ((), None, None)


def test_the_fake_matches_the_real_module() -> None:
    """Every name that our fake offers exists in nvidia-ml-py, so a typo in the probe cannot hide behind the fake."""
    monkeypatched = sys.modules.pop("pynvml", None)
    try:
        import pynvml
    finally:
        if monkeypatched is not None:
            sys.modules["pynvml"] = monkeypatched
    names = [name for name in vars(fake([])) if name.lower().startswith("nvml")]
    assert len(names) >= 20
    assert [name for name in names if not hasattr(pynvml, name)] == []
    values = {name: value for name, value in vars(fake([])).items() if name.startswith("NVML_")}
    assert {name: getattr(pynvml, name) for name in values} == values
