"""monograph::quantize."""

from __future__ import annotations

import functools
from math import prod

import torch

from monograph.ops import library  # noqa: F401  (the schema is registered there)
from monograph.ops.argument_checks import check_dimensions, check_float, check_tensors, dtype_name, require
from monograph.ops.formats import (
    RULES,
    SCALE_GROUP,
    BlockShape,
    Format,
    format_numbered,
    value_table,
)
from monograph.ops.quantize_elements import quantize_elements
from monograph.ops.quantize_groups import quantize_groups

# Below this a scale's reciprocal would overflow; bitsandbytes clamps here.
_SMALLEST_SCALE = 1e-38


def quantize(
    input: torch.Tensor,
    format: int,
    block: int,
    double_quant: bool,
    saturate_nonfinite: bool,
    rule: int = 0,
    scale_bytes: int = 0,
) -> list[torch.Tensor]:
    """[values, *scales] of `input`, all uint8 and flat. Most people call `monograph.quantize` instead.

    `rule` is the number of a scale rule and `scale_bytes` the size of a block scale; 0 is the format's own.
    """
    return torch.ops.monograph.quantize(
        input.detach().contiguous(), format, block, double_quant, saturate_nonfinite, rule, scale_bytes
    )


@functools.cache
def dynamic_map() -> torch.Tensor:
    """The 256 values of the 8-bit map for double quantisation, taken from the C++ table."""
    blank = torch.zeros(32, dtype=torch.float32)
    return torch.ops.monograph.quantize(blank, 1, 32, True, False)[3].view(torch.float32)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _nearest_dynamic_code(x: torch.Tensor) -> torch.Tensor:
    """Exact nearest entry, ties to the lower code: the midpoints are exact in float64."""
    table = dynamic_map().to(device=x.device, dtype=torch.float64)
    return torch.bucketize(x.double(), (table[:-1] + table[1:]) / 2).to(torch.uint8)


def _double_quantized(absmax: torch.Tensor) -> list[torch.Tensor]:
    offset = absmax.double().mean().float().reshape(1) if absmax.numel() else absmax.new_zeros(1)
    centred = absmax - offset
    groups = -(-absmax.numel() // SCALE_GROUP)
    padded = torch.nn.functional.pad(centred, (0, groups * SCALE_GROUP - absmax.numel()))
    largest = padded.reshape(groups, SCALE_GROUP).abs().amax(dim=1)
    inverse = (1.0 / largest.clamp(min=_SMALLEST_SCALE)).repeat_interleave(SCALE_GROUP)
    codes = _nearest_dynamic_code(centred * inverse[: absmax.numel()])
    return [codes, _bytes(largest), _bytes(dynamic_map().to(absmax.device)), _bytes(offset)]


def _encode(fmt: Format, scaled: torch.Tensor) -> torch.Tensor:
    order = torch.tensor(fmt.order, device=scaled.device)
    ascending = value_table(fmt, scaled.device)[order]
    return order[torch.bucketize(scaled, (ascending[:-1] + ascending[1:]) / 2)].to(torch.uint8)


def _check_finite(flat: torch.Tensor, finite: torch.Tensor) -> None:
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        raise RuntimeError(
            f"quantize: input is not finite at flat index {position}; "
            'nonfinite="saturate" lets such values through'
        )


def _absmax_quantize(
    fmt: Format, flat: torch.Tensor, finite: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, one float32 scale per block) as bitsandbytes computes them."""
    elements = flat.numel()
    blocks = -(-elements // block)
    padding = blocks * block - elements
    magnitude = torch.where(finite, flat.abs(), 0.0)
    absmax = torch.nn.functional.pad(magnitude, (0, padding)).reshape(blocks, block).amax(dim=1)
    divisor = absmax.clamp(min=_SMALLEST_SCALE)
    scaled = flat * (1.0 / divisor).repeat_interleave(block)[:elements]
    if padding and bool(finite[(blocks - 1) * block :].all()):
        # The partial last block: bitsandbytes stores the clamped scale and divides by it.
        absmax = torch.cat((absmax[:-1], divisor[-1:]))
        scaled[(blocks - 1) * block :] = flat[(blocks - 1) * block :] / divisor[-1]
    scaled = torch.where(flat.isnan(), 0.0, torch.where(flat.isinf(), flat.sign(), scaled))
    codes = _encode(fmt, torch.nn.functional.pad(scaled, (0, elements % 2)))
    return codes[::2] << 4 | codes[1::2], absmax


def _check_numbers(format: int, block: int, double_quant: bool, rule: int, scale_bytes: int) -> Format:
    """All but the input: for the fake, whose sizes may be symbols, as well."""
    fmt = _format("quantize", format)
    try:
        fmt.check_block(block)
    except ValueError as error:
        raise ValueError(f"quantize: {error}") from None
    require(not double_quant or fmt.double_quant, "quantize", f"format {fmt.name} has no double quantisation")
    found = f"format {fmt.name} is read and trained on, nothing quantises to it"
    require(bool(fmt.rules), "quantize", found)
    rules = [fmt.rule_number(name) for name in fmt.rules]
    require(rule in (0, *rules), "quantize", f"rule is {rule}, format {fmt.name} wants 0 or one of {rules}")
    sizes = [fmt.scale_bytes(kind) for kind in fmt.scale_types]
    found = f"scale_bytes is {scale_bytes}, format {fmt.name} wants 0 or one of {sizes}"
    require(scale_bytes in (0, *sizes), "quantize", found)
    return fmt


def _check_arguments(
    input: torch.Tensor, format: int, block: int, double_quant: bool, rule: int, scale_bytes: int
) -> Format:
    check_tensors("quantize", input=input)
    check_float("quantize", "input", input)
    fmt = _check_numbers(format, block, double_quant, rule, scale_bytes)
    check_dimensions("quantize", input.shape)
    if fmt.shape in (BlockShape.ROW, BlockShape.GROUP):
        try:
            fmt.grid(list(input.shape) or [1], block)
        except ValueError as error:
            raise ValueError(f"quantize: {error}") from None
    if fmt.shape is BlockShape.GROUP:
        matrices = prod(input.shape[:-2])
        found = f"input has {matrices} matrices, format {fmt.name} wants one"
        require(matrices == 1, "quantize", found)
        small = fmt.scale_types[0] == "float16" and input.dtype != torch.float16  # they end at 65504
        found = f"format {fmt.name} has scales in float16, input is {dtype_name(input.dtype)}"
        require(not small, "quantize", f"{found}; wanted float16, or a format with scales of its type")
    return fmt


def portable_quantize(
    input: torch.Tensor,
    format: int,
    block: int,
    double_quant: bool,
    saturate_nonfinite: bool,
    rule: int = 0,
    scale_bytes: int = 0,
) -> list[torch.Tensor]:
    """The operator in aten operations, for any device. Also a second reference in the tests."""
    fmt = _check_arguments(input, format, block, double_quant, rule, scale_bytes)
    flat = input.reshape(-1).float()
    finite = flat.isfinite()
    if not saturate_nonfinite:
        _check_finite(flat, finite)
    if fmt.shape is BlockShape.GROUP:
        return quantize_groups(fmt, input, finite, block, rule)
    if fmt.element is not None:
        return quantize_elements(fmt, flat, finite, list(input.shape), block, rule, scale_bytes)
    values, absmax = _absmax_quantize(fmt, flat, finite, block)
    return [values, *(_double_quantized(absmax) if double_quant else [_bytes(absmax)])]


def _format(op: str, number: int) -> Format:
    try:
        return format_numbered(number)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


@torch.library.register_fake("monograph::quantize")
def _(input, format, block, double_quant, saturate_nonfinite, rule=0, scale_bytes=0):  # type: ignore[no-untyped-def]
    require(input.layout is torch.strided, "quantize", f"input is {input.layout}, wanted an ordinary tensor")
    fmt = _check_numbers(format, block, double_quant, rule, scale_bytes)
    elements = input.numel()
    if fmt.shape is BlockShape.SQUARE:
        blocks = prod(fmt.grid(input.shape, block))
    else:
        blocks = (elements + block - 1) // block
    sizes = [fmt.value_bytes(input.shape) if input.dim() else (elements * fmt.bits + 7) // 8]
    if double_quant:
        sizes += [blocks, 4 * ((blocks + SCALE_GROUP - 1) // SCALE_GROUP), 4 * 256, 4]
    else:
        sizes += [(scale_bytes or fmt.scale_bytes(None)) * blocks]
    if rule == RULES["minmax"]:
        sizes += [fmt.zero_point_bytes(prod(input.shape[:-1]), input.shape[-1] // block)]
    if fmt.tensor_scale:
        sizes += [4 * prod(input.shape[:-2])]
    return [input.new_empty([size], dtype=torch.uint8) for size in sizes]


torch.library.impl("monograph::quantize", "CompositeExplicitAutograd")(portable_quantize)
