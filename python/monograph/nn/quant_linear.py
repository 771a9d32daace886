"""QuantLinear: an nn.Linear whose weight stays packed, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from monograph.nn.lazy_weight import weight_of
from monograph.ops.formats import BlockShape
from monograph.ops.layout import make_layout
from monograph.ops.linear import linear as linear_op
from monograph.quant.packed_weight import PackedWeight, quantize
from monograph.quant.sorted_columns import permuted


class QuantLinear(nn.Linear):
    """A frozen linear layer on a packed weight.

    The stored tensors are ordinary uint8 parameters: `values` and what the format calls its scales: `absmax`
    and, double-quantised, `groups`, `map` and `offset`; or `block_scales` and `tensor_scale`. Casting the
    model changes none of them. `weight` is honest for code that looks at it: it has the logical shape, the
    compute dtype and the device, and dequantises itself if computed with. `columns` is int32 where the file
    has them in another order (quant/sorted_columns.py), else None; input, bias and `weight` keep theirs.

        layer = QuantLinear.from_linear(nn.Linear(4096, 4096, dtype=torch.bfloat16), "nf4", double_quant=True)
    """

    # What PEFT, accelerate and others ask of a quantised layer they do not know.
    is_quantized = True

    rule = "default"  # how scales are chosen when the layer is quantised again
    # Reads the weight that was quantised, as long as somebody knows where it is.
    dense_source: Callable[[], torch.Tensor] | None = None

    values: nn.Parameter
    columns: nn.Parameter | None

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a dense weight
        if len(packed.shape) != 2 or packed.transposed:
            raise ValueError(f"QuantLinear: the weight is {packed!r}, wanted two dimensions, not transposed")
        self.out_features, self.in_features = packed.shape
        self.format = packed.format
        self.block_size = packed.block_size
        self.weight_dtype = packed.dtype
        self.scale_names = packed.format.scale_names[: len(packed.scales)]
        tensors = (packed.values, *packed.scales)
        for name, tensor in zip(("values", *self.scale_names), tensors, strict=True):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        columns = None if packed.columns is None else nn.Parameter(packed.columns, requires_grad=False)
        self.register_parameter("columns", columns)
        self.double_quant = packed.double_quant
        frozen = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", frozen)

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear,
        format: str = "nf4",
        *,
        block_size: int | None = None,
        double_quant: bool = False,
        rule: str = "default",
        scale_type: str | None = None,
    ) -> QuantLinear:
        """Quantises the weight of a dense layer; the bias is kept as it is."""
        packed = quantize(
            layer.weight,
            format,
            block_size=block_size,
            double_quant=double_quant,
            rule=rule,
            scale_type=scale_type,
        )
        made = cls(packed, layer.bias)
        made.rule = rule
        return made

    @property
    def scales(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.scale_names]

    @property
    def stored_names(self) -> list[str]:
        """The parameters that are the weight."""
        return ["values", *self.scale_names, *(() if self.columns is None else ("columns",))]

    @property
    def layout(self) -> list[int]:
        """Of a weight whose columns lie in order; others raise: see `operands`."""
        return self.packed.layout if self.columns is not None else self._stored_layout

    @property
    def _stored_layout(self) -> list[int]:
        return make_layout(self.format.number, self.block_size, (self.out_features, self.in_features))

    def permuted(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] in the order of the stored columns."""
        return permuted(x, self.columns)

    @property
    def operands(self) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """values, scales and layout as they are stored: for operators on what `permuted` gives."""
        return self.values, self.scales, self._stored_layout

    @property
    def packed(self) -> PackedWeight:
        shape = (self.out_features, self.in_features)
        tensors = [t.detach() for t in self.scales]
        columns = None if self.columns is None else self.columns.detach()
        return PackedWeight(
            self.format,
            shape,
            self.block_size,
            self.values.detach(),
            tuple(tensors),
            self.weight_dtype,
            columns=columns,
        )

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return weight_of(self.packed, self.weight_dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                f"weight = {type(value).__name__}: a QuantLinear keeps packed bytes; quantise the values "
                "into a new layer with QuantLinear.from_linear"
            )
        super().__setattr__(name, value)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense weight, a new tensor each time."""
        return self.packed.dequantize(dtype or self.weight_dtype)

    def requantize(self, weight: torch.Tensor) -> PackedWeight:
        """`weight` in the format, block size, double quantisation, rule and scale type of this layer."""
        if self.columns is not None:
            raise ValueError(
                f"the weight is {self.packed!r}, which is not quantised again; wanted one with its columns "
                "in order, or an adapter that leaves the base as it is (no PiSSA, no LoftQ)"
            )
        scale_type = None
        if len(self.format.scale_types) > 1:
            blocks = prod(self.format.grid((self.out_features, self.in_features), self.block_size))
            scale_type = self.format.scale_type(self.scales[0].numel(), blocks)
        # A folder says by its tensors that there are zero points, not by a rule.
        with_zeros = self.format.shape is BlockShape.GROUP and len(self.scale_names) == 2
        packed = quantize(
            weight,
            self.format.name,
            block_size=self.block_size,
            double_quant=self.double_quant,
            rule="minmax" if with_zeros else self.rule,
            scale_type=scale_type,
        )
        return replace(packed, dtype=self.weight_dtype)

    def put(self, packed: PackedWeight) -> None:
        """Takes the bytes of a weight of the same kind. New parameters: the old ones may be mapped files."""
        wanted, found = self.packed, packed
        if wanted.columns is not None or found.columns is not None:
            raise ValueError(f"the weight is {found!r}, wanted columns in order, in it and in {wanted!r}")
        if (wanted.layout, wanted.double_quant) != (found.layout, found.double_quant):
            raise ValueError(f"the weight is {found!r}, wanted {wanted!r}")
        for name, tensor in zip(("values", *self.scale_names), (packed.values, *packed.scales), strict=True):
            old = getattr(self, name)
            setattr(self, name, nn.Parameter(tensor.reshape(old.shape), requires_grad=False))

    def reset_parameters(self) -> None:
        """Packed weights are loaded, never drawn at random."""

    def _apply(self, fn: Any, recurse: bool = True) -> QuantLinear:
        # Casting a model casts the dtype that `weight` reports, and no stored byte.
        probe = fn(torch.empty(0, dtype=self.weight_dtype))
        self.weight_dtype = probe.dtype
        return super()._apply(fn, recurse)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return linear_op(self.permuted(input), *self.operands, bias)

    def extra_repr(self) -> str:
        double = ", double_quant=True" if self.double_quant else ""
        double += "" if self.columns is None else ", columns=sorted by group"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format.name}, block_size={self.block_size}{double}"
        )


def dense_linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """An ordinary layer of these parameters; nn.Linear's own would draw others at random first."""
    rows, cols = weight.shape
    dense = nn.Linear(cols, rows, bias=bias is not None, device="meta")
    dense.weight = weight
    if bias is not None:
        dense.bias = bias
    return dense
