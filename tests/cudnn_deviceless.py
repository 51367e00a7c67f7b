"""Build the graphs of an op with the installed cuDNN for an arch that need not be there: ``OP ARCH`` as arguments.

cuDNN (9.8 and later) plans from a description of a device, and compiles its kernels without the device:
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/utilities/deviceless-ahead-of-time-compilation.html
A process that sees a GPU of another arch cannot: cuDNN 9.19 loads each kernel onto it and fails (seen on an H200).
Prints one line a graph: ``built KEY: plan, workspace`` or ``refused KEY: reason``.
"""

from __future__ import annotations

import itertools
import json
import sys

from fp4dispatch.backends.libraries import cudnn_graphs as graphs
from fp4dispatch.backends.libraries.cudnn import m_bucket
from fp4dispatch.backends.libraries.cudnn_graphs import GraphKey
from fp4dispatch.errors import BackendUnsupportedError

DEVICES = {  # name, multiprocessors, shared memory a block may opt in to
    "8.0": ("NVIDIA A100", 108, 166912),
    "8.9": ("NVIDIA L40S", 142, 101376),
    "9.0": ("NVIDIA H200", 132, 232448),
    "10.0": ("NVIDIA B200", 148, 232448),
    "10.3": ("NVIDIA B300", 148, 232448),
    "11.0": ("NVIDIA Thor", 20, 232448),
    "12.0": ("NVIDIA GeForce RTX 5090", 170, 101376),
    "12.1": ("NVIDIA GB10", 48, 101376),
}
SHAPES = ((1, 208, 160), (144, 4096, 4096))
"""M, N, K after padding: a ragged one, and one of a model."""


def properties(arch: str) -> str:
    """Return the description of a GPU in cuDNN's own JSON."""
    name, multiprocessors, shared = DEVICES[arch]
    major, minor = map(int, arch.split("."))
    return json.dumps(
        {
            "version": 1,
            "deviceName": name,
            "deviceId": 0,
            "cudaDeviceId": 0,
            "deviceVer": major * 100 + minor * 10,
            "driverVer": 13000,
            "driverVersion": 13000,
            "runtimeVersion": 13000,
            "maxGridSize": [2147483647, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "regsPerBlock": 65536,
            "multiProcessorCount": multiprocessors,
            "smCountOrigin": 0,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": shared,
            "oversizedSharedMemoryPerBlock": 0,
            "reservedSharedMemoryPerBlock": 1024,
            "maxRegistersPerSM": 65536,
            "maxCtasPerSM": 24 if shared < 120000 else 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": 1536 if shared < 120000 else 2048,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "smClockRateKHz": 1980000,
            "memClockRateKHz": 3201000,
            "memoryBusWidth": 6144,
            "l2CacheSize": 52428800,
            "totalGlobalMem": 32000000000,
        }
    )


def keys(op: str) -> list[GraphKey]:
    """Return every kind of graph that the backend builds for an op."""
    a_scales = ("one",) if op == "nvfp4_gemm" else ("one", "each")
    b_scales = ("one", "each")
    bias = itertools.cycle((False, True, True))
    return [
        GraphKey(op, m_bucket(m), n, k, out_dtype, a_scale, b_scale, next(bias))
        for (m, n, k), out_dtype, a_scale, b_scale in itertools.product(
            SHAPES, ("bfloat16", "float16", "float32"), a_scales, b_scales
        )
    ]


def main(op: str, arch: str) -> None:
    """Build and print."""
    cudnn = graphs.frontend()
    device = cudnn.create_device_properties(properties(arch))
    for key in keys(op):
        try:
            plan = next(graphs.build_plans(cudnn, key, device_property=device))
            print(f"built {key}: {plan.name}, {plan.workspace_bytes} bytes", flush=True)
        except BackendUnsupportedError as error:
            print(f"refused {key}: {' '.join(str(error).split())}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
