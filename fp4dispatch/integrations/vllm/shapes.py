"""Which parts of a layer tensor parallelism may give to a rank."""

from __future__ import annotations

from fp4dispatch.errors import InputError

MAX_SIZE = 64
"""Largest tensor-parallel size that an error names."""


def check_split(layer: str, k: int, part: int, block: int) -> None:
    """Refuse a layer whose K, or whose part of K on each rank, is not a multiple of the scale block.

    A part that splits a block would need one scale on two ranks. vLLM loads such a part with the scales of other values
    (https://github.com/vllm-project/vllm/issues/48898).

    Parameters
    ----------
    layer
        Name for the error.
    k, part
        K of the whole layer, and of each rank's part.
    block
        Values along K that share a scale.

    Raises
    ------
    InputError
        With the tensor-parallel sizes that work.
    """
    if part % block == 0:
        return
    works = [size for size in range(1, MAX_SIZE + 1) if k % (size * block) == 0]
    if not works:
        raise InputError(
            f"{layer}: K={k} is not a multiple of {block}, the NVFP4 block: leave this layer unquantised in the "
            "checkpoint"
        )
    raise InputError(
        f"{layer}: K={k} on {k // part} ranks is {part} a rank, which splits a block of {block} values that share a "
        f"scale: use a tensor_parallel_size of {', '.join(map(str, works))}"
    )
