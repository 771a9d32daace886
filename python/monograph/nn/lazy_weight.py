"""A weight that knows its shape, dtype and device, and dequantises itself when someone computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from monograph.integrations.torch.private_names import (
    disable_torch_function,
    disabled_torch_function,
    make_wrapper_subclass,
    tree_map_only,
    written,
)
from monograph.packed_weight import PackedWeight
from monograph.spellings.packed_state import PackedParts


def _refuse(how: str) -> NoReturn:
    raise RuntimeError(
        f"{how}: writes to the weight of a QuantLinear, which is packed and frozen: nothing would change. "
        "LoRA and DoRA of PEFT merge into packed weights; for anything else dequantise the model first."
    )


def _readable(weight: PackedParts, func: Any) -> torch.Tensor:
    """What an operation computes with: dense values; the packed bytes for bitsandbytes' own operators."""
    if getattr(func, "namespace", "") == "bitsandbytes":
        return weight.packed.values.reshape(-1, 1)
    return weight.packed.dequantize(weight.dtype)


class LazyWeight(PackedParts):
    """What `QuantLinear.weight` gives. Looking at shape, dtype, device or numel() costs nothing; any
    operation on it runs on the dequantised values, which are not kept. A write is an error."""

    @staticmethod
    def __new__(cls, packed: PackedWeight, dtype: torch.dtype) -> LazyWeight:
        weight = make_wrapper_subclass(
            cls, packed.shape, dtype=dtype, device=packed.device, requires_grad=False
        )
        weight.packed = packed
        return weight

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].dtype)
        tree_map_only(cls, lambda _: _refuse(str(func)), written(func, args, kwargs or {}))

        def readable(weight: LazyWeight) -> torch.Tensor:
            return _readable(weight, func)

        return func(*tree_map_only(cls, readable, args), **tree_map_only(cls, readable, kwargs or {}))

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _refuse("weight.data = ...")

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("weight[...] = ...")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyWeight({self.packed!r}, dtype={self.dtype})"


# What the tracer calls for `+=` and its kin; it knows functions by identity, not by name or hash.
_ASSIGNMENTS = (
    *(torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, torch.Tensor.div_, torch.Tensor.true_divide_),
    *(torch.Tensor.floor_divide_, torch.Tensor.remainder_, torch.Tensor.pow_, torch.Tensor.bitwise_and_),
    *(torch.Tensor.bitwise_or_, torch.Tensor.bitwise_xor_, torch.Tensor.bitwise_left_shift_),
    *(torch.Tensor.bitwise_right_shift_, torch.Tensor.__iadd__, torch.Tensor.__isub__, torch.Tensor.__imul__),
    *(torch.Tensor.__itruediv__, torch.Tensor.__ifloordiv__, torch.Tensor.__imod__, torch.Tensor.__ipow__),
)


class TracedWeight(PackedParts):
    """What `QuantLinear.weight` gives while a graph is traced: the dequantised tensor, one node that leaves
    the graph unless someone computes with it. The tracer cannot make a LazyWeight."""

    @property
    def data(self) -> torch.Tensor:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _refuse("weight.data = ...")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for assignment in _ASSIGNMENTS:
            if func is assignment and isinstance(args[0], cls):
                _refuse("weight += ... or its kin")
        if isinstance(kwargs.get("out"), cls):
            _refuse("out=weight")
        if getattr(func, "namespace", "") == "bitsandbytes":
            args = tuple(_readable(a, func) if isinstance(a, cls) else a for a in args)
        with disable_torch_function():
            return func(*args, **kwargs)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(f"weight.{name}")

    return refuse


# The tracer leaves methods that a subclass overrides to Python, and fails by name with fullgraph=True.
for _name in ("__setitem__", *(name for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_")):
    if _name not in ("detach_", "requires_grad_", "share_memory_"):
        setattr(TracedWeight, _name, _refusing(_name))


def traced_weight(packed: PackedWeight, dtype: torch.dtype) -> TracedWeight:
    weight = packed.dequantize(dtype).as_subclass(TracedWeight)
    weight.packed = packed
    return weight
