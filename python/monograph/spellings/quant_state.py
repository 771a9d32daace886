"""dequantize_4bit: bitsandbytes' live `QuantState`, read attribute by attribute, in eager mode and in graphs.

No JSON, no number is read on the host, nothing is copied. bitsandbytes is not imported.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from monograph.formats import ABSMAX_FORMATS, SCALE_GROUP, Format, value_table
from monograph.integrations.torch.private_names import assert_async
from monograph.ops.layout import make_layout
from monograph.spellings.element_tensors import e4m3_weight
from monograph.spellings.packed_state import PackedParts


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat; a view wherever the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _want(name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise ValueError(f"dequantize_4bit: {name} is {found}, wanted {wanted}")


@cache
def _constant_table(name: str, device: torch.device) -> torch.Tensor:
    return value_table(ABSMAX_FORMATS[name], device)


def _check_code(fmt: Format, code: torch.Tensor) -> None:
    """A state with another table than its type's would decode to other values. Compared on every call: 16
    numbers, 2 us. In a graph, and on devices where reading a number waits, the comparison asserts."""
    message = f"dequantize_4bit: quant_state.code is not the table of {fmt.name}"
    if torch.compiler.is_compiling():
        assert_async((code == value_table(fmt, code.device)).all(), message)
    elif code.device.type != "cpu":
        assert_async((code == _constant_table(fmt.name, code.device)).all(), message)
    elif not torch.equal(code, _constant_table(fmt.name, code.device)):
        raise ValueError(message)


def _scales(state: Any) -> list[torch.Tensor]:
    nested = state.state2
    if nested is None:
        _want("quant_state.absmax.dtype", state.absmax.dtype, torch.float32)
        return [_bytes(state.absmax)]
    _want("quant_state.absmax.dtype", state.absmax.dtype, torch.uint8)
    _want("quant_state.state2.blocksize", nested.blocksize, SCALE_GROUP)
    for name, part in (("absmax", nested.absmax), ("code", nested.code)):
        _want(f"quant_state.state2.{name}.dtype", part.dtype, torch.float32)
    _want("quant_state.offset.dtype", state.offset.dtype, torch.float32)
    return [_bytes(state.absmax), _bytes(nested.absmax), _bytes(nested.code), _bytes(state.offset)]


def dequantize_4bit(tensor: torch.Tensor, quant_state: Any = None) -> torch.Tensor:
    """A drop-in for `bitsandbytes.functional.dequantize_4bit` on weights; one operator in a graph.

    `quant_state` is bitsandbytes' QuantState, nested or plain; its dtype is the result's. A packed tensor of
    shape [1, n], as `.t()` leaves it, gives the transposed weight. Without a state the tensor passes through
    unchanged. An FP8 weight (E4M3) with the tensor of its block scales as `quant_state` gives bf16.

        torch.compile(mg.dequantize_4bit, fullgraph=True)(layer.weight.data, layer.weight.quant_state)
    """
    if quant_state is None:
        return tensor
    if isinstance(tensor, PackedParts):  # of a QuantLinear, whose bytes it holds itself
        return tensor.packed.dequantize(quant_state.dtype)
    if isinstance(quant_state, torch.Tensor):
        _want("the dtype of a weight with a tensor of scales", tensor.dtype, torch.float8_e4m3fn)
        return e4m3_weight(tensor, quant_state, torch.bfloat16).dequantize()
    fmt = ABSMAX_FORMATS.get(quant_state.quant_type)
    if fmt is None:
        known = " or ".join(ABSMAX_FORMATS)
        raise ValueError(
            f"dequantize_4bit: quant_state.quant_type is {quant_state.quant_type}, wanted {known}"
        )
    if quant_state.code is not None:
        _check_code(fmt, quant_state.code)
    layout = make_layout(fmt.number, quant_state.blocksize, quant_state.shape)
    scales = _scales(quant_state)
    dense = torch.ops.monograph.dequantize(_bytes(tensor), scales, layout, quant_state.dtype)
    transposed = tensor.dim() == 2 and tensor.shape[0] == 1 and tensor.shape[1] != 1
    return dense.t() if transposed else dense
