"""A weight that knows its shape, dtype and device, and dequantises itself when someone computes with it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NoReturn

import torch

from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.packed_state import PackedParts
from monograph.upstream.torch_names import (
    disable_torch_function,
    disabled_torch_function,
    make_wrapper_subclass,
    tree_map_only,
    written,
)


def _refuse(how: str) -> NoReturn:
    raise RuntimeError(
        f"{how}: writes to the weight of a QuantLinear, which is packed and frozen: nothing would change. "
        "LoRA and DoRA of PEFT merge into packed weights; for anything else dequantise the model first."
    )


# How people write the transposed weight: t(), T, mT, transpose.
_TRANSPOSING = (torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.permute.default)
# How bitsandbytes' `matmul_4bit` brings packed bytes into a column before it calls an operator on them.
_COLUMN = [-1, 1]


def _is_transposed(func: Any, args: Any) -> bool:
    if func not in _TRANSPOSING:
        return False
    places = [place for given in args[1:] for place in (given if isinstance(given, list) else [given])]
    # permute(0, 1) leaves the weight as it is; t() has no places.
    transposed = [place % 2 for place in places]
    return transposed == [1, 0] or (func is not torch.ops.aten.permute.default and transposed in ([], [0, 1]))


def _gives_transposed(func: Any, args: Any) -> bool:
    """bitsandbytes' `dequantize_4bit` transposes what it computed of bytes in a row, [1, n]. Ours show the
    weight's shape, by which it does not know them."""
    if getattr(func, "namespace", "") != "bitsandbytes" or "dequantize_4bit" not in str(func):
        return False
    first = args[0]
    return isinstance(first, LazyWeight | TracedWeight) and first.packed.transposed and not first.column


def _readable(weight: LazyWeight | TracedWeight, func: Any) -> torch.Tensor:
    """What an operation computes with: dense values; the packed bytes for bitsandbytes' own operators."""
    packed = weight.packed
    column = weight.column
    if getattr(func, "namespace", "") == "bitsandbytes":
        return packed.values.reshape((1, -1) if packed.transposed and not column else (-1, 1))
    dense = packed.dequantize(weight.dtype)
    return dense.view(_COLUMN) if column else dense


class LazyWeight(PackedParts):
    """What `QuantLinear.weight` gives. Looking at shape, dtype, device or numel() costs nothing; any
    operation on it runs on the dequantised values, which are not kept. A write is an error. The transposed
    weight is lazy too; `column` is what `view(-1, 1)` gives, which bitsandbytes takes for packed bytes."""

    column: bool

    @staticmethod
    def __new__(cls, packed: PackedWeight, dtype: torch.dtype, column: bool = False) -> LazyWeight:
        shape, strides = tuple(packed.shape), None
        if column:
            shape = (prod(shape), 1)
        elif len(shape) == 2 and packed.transposed:
            shape, strides = shape[::-1], (1, shape[1])
        weight = make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=packed.device, requires_grad=False
        )
        weight.packed, weight.column = packed, column
        return weight

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].dtype, args[0].column)
        if isinstance(first := args[0] if args else None, cls) and first.dim() == 2:
            if func is torch.ops.aten.view.default and list(args[1]) == _COLUMN:
                return cls(first.packed, first.dtype, column=True)
            if _is_transposed(func, args) and not first.column:
                return cls(first.packed.t(), first.dtype)
        tree_map_only(cls, lambda _: _refuse(str(func)), written(func, args, kwargs or {}))

        def readable(weight: LazyWeight) -> torch.Tensor:
            return _readable(weight, func)

        result = func(*tree_map_only(cls, readable, args), **tree_map_only(cls, readable, kwargs or {}))
        return result.t() if _gives_transposed(func, args) else result

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


# What the tracer calls for `+=` and the like; it knows functions by identity, not by name or hash.
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

    column: bool

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
        transposed = _gives_transposed(func, args)
        if getattr(func, "namespace", "") == "bitsandbytes":
            args = tuple(_readable(a, func) if isinstance(a, cls) else a for a in args)
        with disable_torch_function():
            if isinstance(args[0], cls) and func is torch.Tensor.view and args[1:] == (-1, 1):
                return _traced(args[0].reshape(-1, 1), args[0].packed, column=True)
            result = func(*args, **kwargs)
            if isinstance(args[0], cls) and (func is torch.Tensor.t or func is torch.t):
                return _traced(result, args[0].packed.t())
            return result.t() if transposed else result


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(f"weight.{name}")

    return refuse


# The tracer leaves methods that a subclass overrides to Python, and fails by name with fullgraph=True.
for _name in ("__setitem__", *(name for name in dir(torch.Tensor) if name.endswith("_") and name[0] != "_")):
    if _name not in ("detach_", "requires_grad_", "share_memory_"):
        setattr(TracedWeight, _name, _refusing(_name))


def _traced(dense: torch.Tensor, packed: PackedWeight, column: bool = False) -> TracedWeight:
    weight = dense.as_subclass(TracedWeight)
    weight.packed, weight.column = packed, column
    return weight


def traced_weight(packed: PackedWeight, dtype: torch.dtype) -> TracedWeight:
    return _traced(packed.dequantize(dtype), packed)


def weight_of(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """What a packed layer gives for its `weight`."""
    make = traced_weight if torch.compiler.is_compiling() else LazyWeight
    return make(packed, dtype)
