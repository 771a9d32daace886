"""dequantize_4bit: bitsandbytes' live `QuantState`, read attribute by attribute, in eager mode and in graphs.

No JSON, no number is read on the host, nothing is copied. bitsandbytes is not imported.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from monograph.ops.formats import ABSMAX_FORMATS, SCALE_GROUP, Format, value_table
from monograph.ops.layout import make_layout
from monograph.quant.quant_methods.element_tensors import e4m3_weight
from monograph.quant.quant_methods.packed_state import PackedParts, PackedState
from monograph.upstream.torch_names import assert_async


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


def refuse_rearranged(state: Any) -> None:
    """bitsandbytes on a CPU with AVX512-BF16 reorders a layer's bytes and rounds its scales to bf16 when the
    layer is first called for inference. Nothing can bring the scales back."""
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            "quant_state.packing_format_for_cpu is True: bitsandbytes has reordered the bytes and rounded "
            "the scales for inference, wanted those that it quantised; load the model again"
        )


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


def _check_given(state: Any, given: dict[str, Any]) -> None:
    """bitsandbytes ignores these beside a state; here one that says otherwise is an error."""
    for name, value in given.items():
        if value is not None:
            _want(f"{name}, beside a quant_state with another,", value, getattr(state, name))


def _made_state(
    absmax: torch.Tensor | None, out: torch.Tensor | None, blocksize: int | None, quant_type: str | None
) -> PackedState:
    if absmax is None or out is None:
        missing = "out" if out is None else "absmax"
        raise ValueError(f"dequantize_4bit: {missing} is None without a quant_state, wanted absmax and out")
    name = "fp4" if quant_type is None else quant_type  # bitsandbytes' default
    code = value_table(_format_named(name), absmax.device)
    return PackedState(absmax, code, 64 if blocksize is None else blocksize, out.dtype, name, out.shape)


def _format_named(quant_type: Any) -> Format:
    fmt = ABSMAX_FORMATS.get(quant_type)
    if fmt is None:
        known = " or ".join(ABSMAX_FORMATS)
        raise ValueError(f"dequantize_4bit: quant_state.quant_type is {quant_type}, wanted {known}")
    return fmt


def dequantize_4bit(
    tensor: torch.Tensor,
    quant_state: Any = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
    quant_type: str | None = None,
) -> torch.Tensor:
    """A drop-in for `bitsandbytes.functional.dequantize_4bit` on weights; one operator in a graph.

    `quant_state` is bitsandbytes' QuantState, nested or plain; its dtype is the result's. A packed tensor of
    shape [1, n], as `.t()` leaves it, and `.t()` of the weight of a QuantLinear, give the transposed weight.
    Without a state `absmax` and `out` say what it would, and `quant_type` is "fp4" unless given; without
    anything the tensor passes through unchanged. `blocksize` and `quant_type` beside a state must be its own.
    An FP8 weight (E4M3) with the tensor of its block scales as `quant_state` gives bf16.

        torch.compile(mg.dequantize_4bit, fullgraph=True)(layer.weight.data, layer.weight.quant_state)
    """
    if quant_state is None:
        if absmax is None and out is None:
            return tensor
        quant_state = _made_state(absmax, out, blocksize, quant_type)
    elif not isinstance(quant_state, torch.Tensor):
        refuse_rearranged(quant_state)
        _check_given(quant_state, {"blocksize": blocksize, "quant_type": quant_type})
        if absmax is not None and absmax is not quant_state.absmax:
            raise ValueError(
                "dequantize_4bit: absmax beside a quant_state with another, wanted one of the two"
            )
    dense = _dense(tensor, quant_state)
    if out is None:
        return dense
    _want("out.shape", tuple(out.shape), tuple(dense.shape))
    _want("out.dtype", out.dtype, dense.dtype)
    return out.copy_(dense)


def _dense(tensor: torch.Tensor, quant_state: Any) -> torch.Tensor:
    if isinstance(tensor, PackedParts):  # of a QuantLinear, whose bytes it holds itself
        own = tensor.quant_state
        for name in ("quant_type", "blocksize", "shape"):
            _want(f"quant_state.{name}", getattr(quant_state, name), getattr(own, name))
        return tensor.packed.dequantize(quant_state.dtype)
    if isinstance(quant_state, torch.Tensor):
        _want("the dtype of a weight with a tensor of scales", tensor.dtype, torch.float8_e4m3fn)
        return e4m3_weight(tensor, quant_state, torch.bfloat16).dequantize()
    fmt = _format_named(quant_state.quant_type)
    if quant_state.code is not None:
        _check_code(fmt, quant_state.code)
    layout = make_layout(fmt.number, quant_state.blocksize, quant_state.shape)
    scales = _scales(quant_state)
    dense = torch.ops.monograph.dequantize(_bytes(tensor), scales, layout, quant_state.dtype)
    transposed = tensor.dim() == 2 and tensor.shape[0] == 1 and tensor.shape[1] != 1
    return dense.t() if transposed else dense
