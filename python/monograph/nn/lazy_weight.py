"""A weight that knows its shape, dtype and device, and dequantises itself when someone computes with it."""

from __future__ import annotations

from typing import Any

import torch

from monograph.integrations.torch.private_names import (
    disabled_torch_function,
    make_wrapper_subclass,
    tree_map_only,
    writes,
)
from monograph.packed_weight import PackedWeight


class LazyWeight(torch.Tensor):
    """What `QuantLinear.weight` gives. Looking at shape, dtype, device or numel() costs nothing; any
    operation on it runs on the dequantised values, which are not kept."""

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
        if isinstance(args[0], cls) and writes(func):
            raise RuntimeError(
                f"{func}: writes to the weight of a QuantLinear, which is frozen and packed. "
                "To merge a PEFT adapter, call monograph.optimize(model) first."
            )

        def dense(weight: LazyWeight) -> torch.Tensor:
            return weight.packed.dequantize(weight.dtype)

        return func(*tree_map_only(cls, dense, args), **tree_map_only(cls, dense, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyWeight({self.packed!r}, dtype={self.dtype})"
