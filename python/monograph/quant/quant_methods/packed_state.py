"""What bitsandbytes' habits read of a 4-bit weight: `weight.quant_state`, `weight.absmax`, nested parts.

As others read it:

    state = layer.weight.quant_state
    state.absmax, state.code, state.blocksize, state.state2.absmax      # as bitsandbytes' QuantState has them
    getattr(layer.weight, "nested_absmax")                              # as FSDP walks dotted names
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from monograph.ops.dequantize import as_float32
from monograph.ops.formats import ABSMAX_FORMATS, SCALE_GROUP, value_table
from monograph.quant.packed_weight import PackedWeight


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

    @property
    def nested(self) -> bool:
        return self.state2 is not None

    def __getattr__(self, name: str) -> torch.Tensor:
        """`bitsandbytes__nf4`: the bytes of the JSON that bitsandbytes keeps in a state dict."""
        if self.quant_type is None or name != f"bitsandbytes__{self.quant_type}":
            raise AttributeError(f"PackedState has no attribute {name!r}")
        return self.as_dict(packed=True)[f"quant_state.{name}"]

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        """As QuantState's: numbers, names and tensors; with `packed` tensors alone, for a state dict."""
        tensors = {"absmax": self.absmax, "quant_map": self.code}
        others: dict[str, Any] = {
            "quant_type": self.quant_type,
            "blocksize": self.blocksize,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": None if self.shape is None else tuple(self.shape),
        }
        if self.state2 is not None:
            assert self.offset is not None
            tensors |= {"nested_absmax": self.state2.absmax, "nested_quant_map": self.state2.code}
            others |= {
                "nested_blocksize": self.state2.blocksize,
                "nested_dtype": str(self.state2.dtype).removeprefix("torch."),
                "nested_offset": self.offset.item(),
            }
        if not packed or self.quant_type is None:
            return tensors | others
        text = torch.tensor(list(json.dumps(others).encode()), dtype=torch.uint8, device=self.absmax.device)
        return tensors | {f"quant_state.bitsandbytes__{self.quant_type}": text}


def packed_state(packed: PackedWeight, dtype: torch.dtype) -> PackedState:
    name = packed.format.name
    if name not in ABSMAX_FORMATS:
        raise AttributeError(f"a weight in {name} has no quant_state; `packed` has its values and scales")
    code, shape = value_table(packed.format, packed.device), torch.Size(packed.shape)
    if not packed.double_quant:
        return PackedState(as_float32(packed.scales[0]), code, packed.block_size, dtype, name, shape)
    codes, groups, table, offset = packed.scales
    nested = PackedState(as_float32(groups), as_float32(table), SCALE_GROUP, torch.float32)
    middle = as_float32(offset).reshape([])
    return PackedState(codes.reshape(-1), code, packed.block_size, dtype, name, shape, middle, nested)


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

    @property
    def nested_blocksize(self) -> int:
        return _nested(self.quant_state).blocksize

    @property
    def nested_dtype(self) -> torch.dtype:
        return _nested(self.quant_state).dtype

    @property
    def nested_offset(self) -> torch.Tensor | None:
        return self.quant_state.offset

    @property
    def blocksize(self) -> int:
        return self.quant_state.blocksize

    @property
    def quant_type(self) -> str | None:
        return self.quant_state.quant_type

    @property
    def compress_statistics(self) -> bool:
        return self.quant_state.nested


def _nested(state: PackedState) -> PackedState:
    if state.state2 is None:
        raise AttributeError("the scales of this weight are not nested")
    return state.state2
