"""What bitsandbytes' habits read of a 4-bit weight: `weight.quant_state`, `weight.absmax`, nested parts.

As others read it:

    state = layer.weight.quant_state
    state.absmax, state.code, state.blocksize, state.state2.absmax      # as bitsandbytes' QuantState has them
    getattr(layer.weight, "nested_absmax")                              # as FSDP walks dotted names
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monograph.formats import ABSMAX_FORMATS, SCALE_GROUP, value_table
from monograph.ops.dequantize import as_float32
from monograph.packed_weight import PackedWeight


@dataclass(eq=False)
class PackedState:
    """The attributes of bitsandbytes' QuantState, made from a packed weight. `absmax` is float32, or the
    bytes of nested scales; the numbers are copies, which are small, of the weight's bytes."""

    absmax: torch.Tensor
    code: torch.Tensor
    blocksize: int
    dtype: torch.dtype
    quant_type: str | None = None
    shape: torch.Size | None = None
    offset: torch.Tensor | None = None
    state2: PackedState | None = None
    packed: PackedWeight | None = None

    @property
    def nested(self) -> bool:
        return self.state2 is not None

    def __getattr__(self, name: str) -> torch.Tensor:
        """`bitsandbytes__nf4`: the bytes of the JSON that bitsandbytes keeps in a state dict."""
        if self.quant_type is None or name != f"bitsandbytes__{self.quant_type}" or self.packed is None:
            raise AttributeError(f"PackedState has no attribute {name!r}")
        from monograph.spellings.bitsandbytes import to_bitsandbytes

        return to_bitsandbytes(self.packed)[f"weight.quant_state.{name}"]


def packed_state(packed: PackedWeight, dtype: torch.dtype) -> PackedState:
    name = packed.format.name
    if name not in ABSMAX_FORMATS:
        raise AttributeError(f"a weight in {name} has no quant_state; `packed` has its values and scales")
    code, shape = value_table(packed.format, packed.device), torch.Size(packed.shape)
    if not packed.double_quant:
        return PackedState(
            as_float32(packed.scales[0]), code, packed.block_size, dtype, name, shape, packed=packed
        )
    codes, groups, table, offset = packed.scales
    nested = PackedState(as_float32(groups), as_float32(table), SCALE_GROUP, torch.float32)
    middle = as_float32(offset).reshape([])
    return PackedState(codes.reshape(-1), code, packed.block_size, dtype, name, shape, middle, nested, packed)


class PackedParts(torch.Tensor):
    """A weight that also answers to the names of bitsandbytes' Params4bit."""

    packed: PackedWeight

    @property
    def quant_state(self) -> PackedState:
        return packed_state(self.packed, self.dtype)

    @property
    def absmax(self) -> torch.Tensor:
        return self.quant_state.absmax

    @property
    def code(self) -> torch.Tensor:
        return self.quant_state.code

    @property
    def quant_map(self) -> torch.Tensor:
        return self.quant_state.code

    @property
    def offset(self) -> torch.Tensor | None:
        return self.quant_state.offset

    @property
    def state2(self) -> PackedState | None:
        return self.quant_state.state2

    @property
    def nested_absmax(self) -> torch.Tensor:
        return _nested(self.quant_state).absmax

    @property
    def nested_quant_map(self) -> torch.Tensor:
        return _nested(self.quant_state).code


def _nested(state: PackedState) -> PackedState:
    if state.state2 is None:
        raise AttributeError("the scales of this weight are not nested")
    return state.state2
