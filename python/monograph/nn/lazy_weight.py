"""A weight that knows its shape, dtype and device, and dequantises itself when someone computes with it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from monograph.integrations.torch.private_names import (
    disabled_torch_function,
    make_wrapper_subclass,
    tree_map_only,
    written,
)
from monograph.packed_weight import PackedWeight


def _refuse(how: str) -> NoReturn:
    raise RuntimeError(
        f"{how}: writes to the weight of a QuantLinear, which is packed and frozen: nothing would change. "
        "LoRA and DoRA of PEFT merge into packed weights; for anything else dequantise the model first."
    )


class LazyWeight(torch.Tensor):
    """What `QuantLinear.weight` gives. Looking at shape, dtype, device or numel() costs nothing; any
    operation on it runs on the dequantised values, which are not kept. A write is an error."""

    packed: PackedWeight

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

        def dense(weight: LazyWeight) -> torch.Tensor:
            return weight.packed.dequantize(weight.dtype)

        return func(*tree_map_only(cls, dense, args), **tree_map_only(cls, dense, kwargs or {}))

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
