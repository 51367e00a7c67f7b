"""Runs in a process of its own, started by test_host_calls.py: launches on tensors that only seem to be on GPUs.

    python host_calls.py RUNTIME LIBRARY FUNCTION < arguments.json

``RUNTIME`` stands in for the CUDA runtime (cuda_calls.c), which ``LIBRARY`` is not linked with. Arguments are tensors
``[dlpack code, bits, shape, strides]``, None, plain values, ``{"numbers": [...]}``, or functions of other libraries,
``{"library": path, "function": name}``. Steps are ``[device of the tensors, call that fails, arguments that replace
others, by index, run in a thread of its own]``, and launch once each. A tensor's address hangs on its index, unless it
stands behind the strides. Prints JSON: for each step the calls by name, the device that is current after it, the error,
the TMA descriptors of the launch, ``[address, sizes, sizes, whether CUTLASS changed it]``, zeros after the last, and
its attributes by name. ``driver``: the CUDA version of the driver.
torch stays out: one with CUDA would bring the true runtime.
"""

from __future__ import annotations

import ctypes
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]

import tvm_ffi  # noqa: E402

CUDA = 2
ADDRESS = 1 << 44
"""Never read: no kernel runs."""
MAPS = 4
ATTRIBUTES = {"pdl": 6, "carveout": 14}
"""Numbers of cudaLaunchAttributeID."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OnGpu:
    """A tensor of DLPack."""

    def __init__(
        self, code: int, bits: int, shape: list[int], strides: list[int], device: int, address: int = ADDRESS
    ) -> None:
        self.device = device
        self.sizes = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))(*strides)
        self.tensor = _Tensor(address, CUDA, device, len(shape), code, bits, 1, *self.sizes, 0, None, None)

    def __dlpack__(self, **options: Any) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device


def main(runtime: str, library: str, function: str) -> None:
    """Do the steps."""
    fake = ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    fake.counted_name.restype, fake.counted_calls.restype = ctypes.c_char_p, ctypes.c_long
    fake.launched_map.restype = ctypes.c_uint64
    launch = getattr(tvm_ffi.load_module(library), function)
    fake.launched_attribute.restype = ctypes.c_long
    given = json.load(sys.stdin)
    fake.driver_is(given["driver"])
    keep, rows = [], []
    for device, failing, replaced, threaded in given["steps"]:
        arguments = []
        for i, argument in enumerate(given["arguments"]):
            argument = replaced.get(str(i), argument)
            if isinstance(argument, list):
                address = [ADDRESS + (i << 32)][len(argument) - 4 :]
                keep.append(OnGpu(*argument[:4], device, *argument[4:], *address))
                argument = tvm_ffi.from_dlpack(keep[-1])
            elif isinstance(argument, dict) and "numbers" in argument:
                argument = tvm_ffi.Array(argument["numbers"])
            elif isinstance(argument, dict):
                argument = getattr(tvm_ffi.load_module(argument["library"]), argument["function"])
            arguments.append(argument)
        fake.fail_with(failing.encode(), 1)
        fake.counts_reset()
        with ThreadPoolExecutor(1) as pool:
            raised = pool.submit(launch, *arguments).exception() if threaded else _raised(launch, arguments)
        calls = {}
        i = 0
        while name := fake.counted_name(i):
            calls[name.decode()], i = fake.counted_calls(i), i + 1
        rows.append({"calls": calls, "error": str(raised or ""), "current": fake.current_device()})
        rows[-1] |= {name: fake.launched_attribute(number) for name, number in ATTRIBUTES.items()}
        words = [[fake.launched_map(i, word) for word in (2, 3, 4, 1)] for i in range(MAPS)]
        rows[-1]["maps"] = [[*of, bool(of[0]) and bits != (1 << 64) - 1] for *of, bits in words]
    print(json.dumps(rows))


def _raised(launch: Any, arguments: list[Any]) -> Exception | None:
    try:
        launch(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return error
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
