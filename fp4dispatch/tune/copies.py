"""The weights of one layer as backends store them, and copies of them that keep measurements out of the cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from fp4dispatch.backends.base import Backend, LinearWeights, Prepared
from fp4dispatch.tune import timing
from fp4dispatch.tune.timing import Engine

SHARE_OF_FREE_MEMORY = 0.5


class Copies:
    """Rotating copies of a layer's weights, made when they are first asked for. They serve every M.

    Parameters
    ----------
    weights
        Canonical weights, on the device that is measured.
    engine
        What takes the times; its cache says how many copies are enough.
    """

    def __init__(self, weights: LinearWeights, engine: Engine) -> None:
        self.weights, self.engine = weights, engine
        self._held: dict[str, list[Prepared]] = {}

    def of(self, backend: Backend, rivals: int) -> list[Prepared]:
        """Return the weights in a backend's layout, and enough copies to keep them out of the cache.

        Fewer where half of the free memory does not hold those of ``rivals`` backends. Launches share them, and so do
        backends of one layout.
        """
        layout = backend.layout_name
        if layout not in self._held:
            prepared, engine = backend.prepare(self.weights), self.engine
            size = max(prepared.nbytes(), 1)
            count = timing.copies_for(size, engine.cache_bytes)
            if prepared.tensors[0].is_cuda:
                torch.cuda.empty_cache()  # else what the layer before has given up does not count as free
                free, _ = torch.cuda.mem_get_info(prepared.tensors[0].device)
                count = max(1, min(count, int(SHARE_OF_FREE_MEMORY * free / rivals / size)))
            clones = [replace(prepared, tensors=tuple(t.clone() for t in prepared.tensors)) for _ in range(count - 1)]
            engine.finish()  # a PDL kernel may read weights before this stream has copied them
            self._held[layout] = [prepared, *clones]
        return [replace(each, backend=backend.name) for each in self._held[layout]]
