"""Notice weights that moved, were replaced or written after a capture: segments read fixed addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from fp4dispatch.models.quantized_linear import QuantizedLinear

_Held = tuple[Mapping[str, Tensor | None], str, Tensor, int]
_Layout = tuple[nn.Module, str, Tensor, int]


class Watch:
    """The submodules and tensors of captured modules, with the addresses of tensors, and how modules are called.

    Values written in place to plain weights need nothing: segments read them where they are. The same holds for other
    memory at the address of the old, as the allocator may hand it out again. Quantised weights that were written, or
    have other memory, are packed again, into the same memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._quantized: list[QuantizedLinear] = []
        self._held: list[_Held] = []
        self._layouts: list[_Layout] = []
        self._children: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        self._calls: list[tuple[nn.Module, object, object]] = []
        done: set[int] = set()
        for module in modules:
            for child in module.modules():
                if id(child) in done:
                    continue
                done.add(id(child))
                own = child.__dict__
                self._calls.append((child, own.get("forward"), own.get("_compiled_call_impl")))
                self._children += [(child._modules, name, each) for name, each in child._modules.items() if each]
                if isinstance(child, QuantizedLinear):
                    self._quantized.append(child)
                    self._hold_layouts(child)
                else:
                    self._hold(child)

    def _hold(self, module: nn.Module) -> None:
        owners: tuple[Mapping[str, Tensor | None], ...] = (module._parameters, module._buffers)
        for owner in owners:
            for name, tensor in owner.items():
                if tensor is not None:
                    self._held.append((owner, name, tensor, tensor.data_ptr()))

    def _hold_layouts(self, layer: QuantizedLinear) -> None:
        """Hold what kernels read. A layer that drops or restores weights gets a new dictionary of buffers."""
        if layer.bias is not None:
            self._held.append((layer._parameters, "bias", layer.bias, layer.bias.data_ptr()))
        for name, tensor in layer._buffers.items():
            if tensor is not None and name.startswith("layout"):
                self._layouts.append((layer, name, tensor, tensor.data_ptr()))

    def moved(self) -> str:
        """Return the name of a tensor or module that is not where it was; empty if all are.

        Packs written weights again.

        Raises
        ------
        InputError, FormatError
            If the written weights do not fit the format.
        """
        for each in self._quantized:
            if not each._state.unchanged(each._buffers):
                each._update_layouts()
                each._hold_once()
        for module, forward, compiled in self._calls:
            held = module.__dict__
            if held.get("forward") is not forward or held.get("_compiled_call_impl") is not compiled:
                return f"forward of {type(module).__name__}"
        for modules, name, child in self._children:
            if modules.get(name) is not child:
                return name
        for owner, name, tensor, address in self._held:
            if owner.get(name) is not tensor or tensor.data_ptr() != address:
                return name
        for layer, name, tensor, address in self._layouts:
            if layer._buffers.get(name) is not tensor or tensor.data_ptr() != address:
                return name
        return ""
