"""Check that tensors which are copied unchanged hold finite values."""

from __future__ import annotations

import torch

from fp4dispatch.errors import CheckpointError

_CHUNK = 1 << 22
"""Elements per step. Limits the temporary memory for a large embedding."""


def check_finite(where: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with NaN or Inf in it. Reads all of it.

    Attention masks contain ``-Inf``, and the bounds of Gemma 4 are ``-Inf`` and ``Inf`` where they clip nothing. So
    ``-Inf`` is allowed in tensors whose name does not end in ``weight`` or ``bias``, and ``Inf`` in those whose name
    ends in ``.max`` or ``_max``; not in an ``amax``, which is a largest value that was seen.

    Parameters
    ----------
    where, name
        File or model, and the tensor's name, for the error.
    tensor
        Any shape, dtype and device; integers pass, and so does a tensor on the meta device.

    Raises
    ------
    CheckpointError
        NaN; Inf where it is no bound; -Inf in a weight or bias.
    """
    if not tensor.is_floating_point() or tensor.is_meta:
        return
    parameter, bound = name.endswith(("weight", "bias")), name.endswith((".max", "_max"))
    for part in torch.split(tensor.detach().reshape(-1), _CHUNK):
        values = part.float() if part.element_size() == 1 else part
        fine = torch.isfinite(values) if parameter else values <= torch.inf if bound else values < torch.inf
        good = bool(fine.all())
        if not good:
            raise CheckpointError(
                f"{where}: tensor {name!r} holds NaN or Inf, expected finite values: the checkpoint is damaged, or the "
                "training that wrote it diverged"
            )
