"""Detection on real hardware: NVML's answer, read as we read it, against the driver's own list of devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is visible"),
]

# Asks libcuda itself, without torch; prints the UUID and capability of each device.
DRIVER = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0)
count = ctypes.c_int(0)
if code == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
devices = []
for i in range(count.value):
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    raw = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), i)
    cuda.cuDeviceGetUuid_v2(raw, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    devices.append(["GPU-" + str(uuid.UUID(bytes=bytes(raw))), "%d.%d" % (major.value, minor.value)])
print(json.dumps(devices))
"""

OURS = """
import json, fp4dispatch
print(json.dumps([[gpu.uuid, gpu.arch.capability] for gpu in fp4dispatch.gpus]))
"""


def ask(script: str, visible: str | None) -> Any:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(answer.stdout)


LISTS = [
    None, "", " ", "-1", "0", " 0", "0 ", "00", "+0", "-0", "0,0", "0,-1", "0,-1,0", "0,99", "0,99,0", "99",
    "99,0", "0,x", "x", "x,0", "0x0", "0gpu", "-", "+", "0,-", "0,,0", ",0", "NoDevFiles", "1", "1,0", "0,1",
    "0,1,0", "0,GPU-", "GPU-", "4294967296", "-4294967296", "18446744073709551616", "GPU-{0}", "GPU-{0},GPU-{0}",
    "GPU-{0},0", "GPU-{0:.4}", "GPU-{0:.4},GPU-{0:.8}", "GPU-{0},GPU-zzzz", "GPU-zzzz", "GPU-zzzz,GPU-{0}",
    "gpu-{0}", " GPU-{0}", "GPU-{0} ", "GPU-{0:.4} ", "GPU-{0:.4}-", "GPU-{0}x", "GPU-{0:.35}x", "GPU-{0},",
    "GPU-{0}, GPU-zz", "GPU-{0},GPU-", "MIG-{0}", "MIG-{0:.4}", "GPU-{0},MIG-{0}", "MIG-{0},0", "MIG-GPU-{0}/0/0",
    "MIG-GPU-{0}",
]  # fmt: skip


def test_we_see_what_the_driver_sees() -> None:
    first = ask(DRIVER, None)[0][0].removeprefix("GPU-")
    values = [visible.format(first) if visible else visible for visible in LISTS]
    different = {value: (ask(OURS, value), ask(DRIVER, value)) for value in values}
    assert {value: answers for value, answers in different.items() if answers[0] != answers[1]} == {}


@pytest.mark.parametrize("order", ["FASTEST_FIRST", "PCI_BUS_ID", "", "pci_bus_id"])
def test_we_order_as_the_driver_does(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert ask(OURS, None) == ask(DRIVER, None)


def test_a_fork_after_import_can_use_cuda() -> None:
    script = """
import os, fp4dispatch
assert fp4dispatch.gpus and fp4dispatch.gpu_arch is not None
pid = os.fork()
if pid == 0:
    import torch
    ok = (torch.ones(4, device="cuda") * 2).sum().item() == 8.0
    os._exit(0 if ok else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
import torch
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_current_agrees_with_cuda_once_it_is_up() -> None:
    from fp4dispatch.machine import system

    torch.cuda.init()
    system.refresh()
    now = system.current()
    assert [g.arch.capability for g in now.gpus] == [
        "{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())
    ]
    assert [g.uuid for g in now.gpus] == [g.uuid for g in system.detected().gpus]
    assert not [note for note in now.notes if "otherwise than NVML" in note]
    assert now.driver is not None
    assert now.cuda == torch.version.cuda
    torch.backends.cudnn.version()  # loads cuDNN
    system.refresh()
    cudnn = system.current().cudnn
    assert cudnn is not None
    major, minor, patch = (int(part) for part in cudnn.version.split("."))
    assert major * 10000 + minor * 100 + patch == torch.backends.cudnn.version()


def test_capture_is_seen_and_refused() -> None:
    from fp4dispatch.errors import CaptureError
    from fp4dispatch.machine.capture import forbid_in_capture, is_capturing

    torch.zeros(1, device="cuda")
    assert not is_capturing()
    forbid_in_capture("building a plan", "warmup()")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert is_capturing()
        with pytest.raises(CaptureError, match="warmup"):
            forbid_in_capture("building a plan", "warmup()")
    assert not is_capturing()
