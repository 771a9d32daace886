"""The packed formats by name: their numbers in operator schemas, block sizes, code tables and scale rules.

The numbers and tables are those of core/monograph/formats; tests/python/ops/test_formats.py compares them.
What a rule means is written in the format's header there and in docs/reference/formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from types import MappingProxyType

import torch


class BlockShape(Enum):
    """How a scale block lies on the weight."""

    FLAT = 0  # consecutive elements of the flattened tensor
    ROW = 1  # consecutive elements of a row; rows are whole blocks
    SQUARE = 2  # block x block, the grid anchored at each matrix's first element
    GROUP = 3  # elements of a row, as many as divide its length; rows are whole words
    INTERLEAVED = 4  # elements of a row, their scales beside them; rows are whole blocks


class ZeroPoints(Enum):
    """How the zero points of groups are stored, where a weight has them."""

    NONE = 0
    BYTES = 1  # int8 [rows, groups]
    PACKED = 2  # codes packed along the rows in words of 32 bits: [ceil(rows * bits / 32), groups]


@dataclass(frozen=True)
class Minifloat:
    """The number type of an element: `mantissa` bits, exponent bias, code of the largest finite value."""

    mantissa: int
    bias: int
    largest_code: int
    sign_code: int

    def value(self, code: int) -> float:
        magnitude = code & (self.sign_code - 1)
        if magnitude > self.largest_code:
            return float("nan")
        exponent, fraction = divmod(magnitude, 1 << self.mantissa)
        ones = fraction if exponent == 0 else fraction | 1 << self.mantissa
        value = ones * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa)
        return -value if code & self.sign_code else value


E2M1 = Minifloat(mantissa=1, bias=1, largest_code=0x7, sign_code=0x8)
E4M3 = Minifloat(mantissa=3, bias=7, largest_code=0x7E, sign_code=0x80)

# The numbers of monograph::ScaleRule.
RULES = MappingProxyType(
    {
        "default": 0,
        "absmax": 1,
        "floor": 2,
        "ceil": 3,
        "even": 4,
        "rceil": 5,
        "transformer-engine": 6,
        "torchao": 7,
        "compressed-tensors": 8,
        "modelopt": 9,
        "transformers": 10,
        "minmax": 11,
    }
)
_SCALE_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class Format:
    """One packed format. `values[code]` times the scale of the block is the element."""

    name: str
    number: int
    bits: int
    block_sizes: tuple[int, ...]
    values: tuple[float, ...]
    order: tuple[int, ...] = ()  # order[i] is the code of the i-th smallest value; absmax formats
    element: Minifloat | None = None  # absmax formats have none
    shape: BlockShape = BlockShape.FLAT
    low_nibble_first: bool = False
    double_quant: bool = False
    tensor_scale: str = ""  # "multiplies" or "divides" where the matrix has a scale of its own
    scale_names: tuple[str, ...] = ("block_scales",)
    scale_types: tuple[str, ...] = ("float32",)  # the first is what quantize gives unless told otherwise
    rules: Mapping[str, str] = field(default_factory=lambda: {"absmax": "absmax"})  # the first is the default
    zero_points: ZeroPoints = ZeroPoints.NONE
    row_align: int = 1  # bytes of which rows of values are a multiple
    block_bytes: int = 0  # of a block with its scales, in INTERLEAVED

    @property
    def default_block(self) -> int:
        if self.shape is BlockShape.GROUP:  # 0 is the row
            return 128 if self.bits == 4 else 0
        return 64 if 64 in self.block_sizes else self.block_sizes[0]

    def check_block(self, block: int) -> None:
        if isinstance(block, (bool, float, str)):
            raise TypeError(f"block size is {block!r}, wanted a whole number")
        if self.shape is BlockShape.GROUP:
            if not 1 <= block <= 2**56:
                wanted = "wants 1 or more, at most 2^56"
                raise ValueError(f"block size is {block}, format {self.name} {wanted}")
        elif block not in self.block_sizes:
            raise ValueError(f"block size is {block}, format {self.name} wants one of {self.block_sizes}")

    def rule_number(self, name: str) -> int:
        """The number of a rule by its name or a producer's; "default" is the first."""
        if not self.rules:
            raise ValueError(f"format {self.name} is read and trained on, nothing quantises to it")
        rules = {"default": next(iter(self.rules.values())), **self.rules}
        if name not in rules:
            raise ValueError(f"rule is {name!r}, format {self.name} wants one of {', '.join(rules)}")
        return RULES[rules[name]]

    def scale_bytes(self, scale_type: str | None) -> int:
        """Bytes of one block scale of this type; None is the format's own."""
        name = scale_type or self.scale_types[0]
        if name not in self.scale_types:
            raise ValueError(
                f"scale type is {name!r}, format {self.name} wants one of {', '.join(self.scale_types)}"
            )
        return _SCALE_TYPES[name]

    def scale_type(self, size: int, blocks: int) -> str:
        """The type of `blocks` scales that take `size` bytes."""
        for name in self.scale_types:
            if size == blocks * _SCALE_TYPES[name]:
                return name
        wanted = " or ".join(f"{blocks * _SCALE_TYPES[n]} ({n})" for n in self.scale_types)
        raise ValueError(f"scales[0] has {size} bytes, format {self.name} wants {wanted}")

    def grid(self, shape: Sequence[int], block: int) -> list[int]:
        """The shape of the block scales: one number per block."""
        *lead, cols = shape
        if self.shape is BlockShape.SQUARE:
            *experts, rows = lead or [1]
            return [*experts, -(-rows // block), -(-cols // block)]
        if self.shape not in (BlockShape.FLAT, BlockShape.SQUARE) and cols % block:
            raise ValueError(f"rows have {cols} elements, format {self.name} wants a multiple of {block}")
        return [*lead, cols // block] if cols % block == 0 else [-(-prod(shape) // block)]

    def packed_bytes(self, elements: int) -> int:
        if self.shape is BlockShape.INTERLEAVED:
            return elements // self.block_sizes[0] * self.block_bytes
        return (elements * self.bits + 7) // 8

    def row_bytes(self, cols: int) -> int:
        """From one row of values to the next, with groups of a row or scales beside the values."""
        return -(-self.packed_bytes(cols) // self.row_align) * self.row_align

    def value_bytes(self, shape: Sequence[int]) -> int:
        """All bytes of the values of a weight of this shape."""
        if self.shape is BlockShape.GROUP:
            return prod(shape[:-1]) * self.row_bytes(shape[-1])
        return self.packed_bytes(prod(shape))

    def zero_point_bytes(self, rows: int, groups: int) -> int:
        if self.zero_points is ZeroPoints.BYTES:
            return rows * groups
        return 4 * -(-rows * self.bits // 32) * groups


_ABSMAX_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_ABSMAX_SCALES = ("absmax", "groups", "map", "offset")
_NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)
_E2M1_VALUES = tuple(E2M1.value(code) for code in range(16))
_E4M3_VALUES = tuple(E4M3.value(code) for code in range(256))


def _absmax(name: str, number: int, values: tuple[float, ...], order: tuple[int, ...]) -> Format:
    return Format(
        name, number, 4, _ABSMAX_BLOCKS, values, order, double_quant=True, scale_names=_ABSMAX_SCALES
    )


def _nvfp4(name: str, number: int, tensor_scale: str) -> Format:
    rules = ("modelopt", "torchao", "transformer-engine", "compressed-tensors")
    return Format(
        name,
        number,
        4,
        (16,),
        _E2M1_VALUES,
        element=E2M1,
        shape=BlockShape.ROW,
        low_nibble_first=True,
        tensor_scale=tensor_scale,
        scale_names=("block_scales", "tensor_scale"),
        scale_types=("e4m3",),
        rules={rule: rule for rule in rules},
    )


NF4 = _absmax("nf4", 1, _NF4_VALUES, tuple(range(16)))
FP4 = _absmax("fp4", 2, tuple(x / 12 for x in _FP4_TWELFTHS), _FP4_ORDER)
MXFP4 = Format(
    "mxfp4",
    3,
    4,
    (32,),
    _E2M1_VALUES,
    element=E2M1,
    shape=BlockShape.ROW,
    low_nibble_first=True,
    scale_types=("e8m0",),
    rules={
        **{rule: rule for rule in ("even", "floor", "ceil", "rceil", "transformer-engine")},
        "torchao": "floor",
        "compressed-tensors": "even",
    },
)
MXFP8 = Format(
    "mxfp8",
    4,
    8,
    (32,),
    _E4M3_VALUES,
    element=E4M3,
    shape=BlockShape.ROW,
    scale_types=("e8m0",),
    rules={
        **{rule: rule for rule in ("rceil", "floor", "ceil", "even", "transformer-engine")},
        "compressed-tensors": "compressed-tensors",
        "torchao": "floor",
        "modelopt": "rceil",
    },
)
NVFP4 = _nvfp4("nvfp4", 5, "multiplies")
NVFP4_DIVIDE = _nvfp4("nvfp4-divide", 6, "divides")
FP8_BLOCK = Format(
    "fp8-block",
    7,
    8,
    (128,),
    _E4M3_VALUES,
    element=E4M3,
    shape=BlockShape.SQUARE,
    scale_types=("float32", "bfloat16", "e8m0"),
    rules={r: r for r in ("absmax", "transformers", "transformer-engine", "compressed-tensors")},
)

_SCALE_SUFFIXES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _groups(
    name: str, number: int, bits: int, zero_points: ZeroPoints, row_align: int = 1
) -> dict[str, Format]:
    """A code in groups of a row: a format for each type of its scales, which sizes alone do not tell."""
    floats = zero_points is ZeroPoints.NONE
    rules = {"absmax": "absmax", "compressed-tensors": "absmax", **({} if floats else {"minmax": "minmax"})}
    return {
        f"{name}-{suffix}": Format(
            f"{name}-{suffix}",
            number + i,
            bits,
            (),
            _E4M3_VALUES if floats else (),
            element=E4M3 if floats else None,
            shape=BlockShape.GROUP,
            low_nibble_first=True,
            scale_names=("block_scales",) if floats else ("block_scales", "zero_points"),
            scale_types=(scale_type,),
            rules=rules,
            zero_points=zero_points,
            row_align=row_align,
        )
        for i, (suffix, scale_type) in enumerate(_SCALE_SUFFIXES.items())
    }


def _ggml(name: str, number: int, bits: int, block: int, block_bytes: int) -> Format:
    """A block of ggml. `row_map` is int32 as bytes: the stored row of each row, where the order differs."""
    return Format(
        name,
        number,
        bits,
        (block,),
        (),
        shape=BlockShape.INTERLEAVED,
        scale_names=("row_map",),
        scale_types=(),
        rules={},
        block_bytes=block_bytes,
    )


# Blocks of one size, or flat ones; experts may have them.
FORMATS = {f.name: f for f in (NF4, FP4, MXFP4, MXFP8, NVFP4, NVFP4_DIVIDE, FP8_BLOCK)}
# int4, int8 and FP8 with scales of rows or groups of them, as compressed-tensors has them.
GROUP_FORMATS = {
    **_groups("int4", 8, 4, ZeroPoints.PACKED, row_align=4),
    **_groups("int8", 11, 8, ZeroPoints.BYTES),
    **_groups("int8-packed", 14, 8, ZeroPoints.PACKED, row_align=4),
    **_groups("fp8-row", 17, 8, ZeroPoints.NONE),
}
# Blocks as they lie in a GGUF file; nothing quantises to them.
GGML_FORMATS = {
    f.name: f
    for f in (
        _ggml("q8_0", 20, 8, 32, 34),
        _ggml("q4_0", 21, 4, 32, 18),
        _ggml("q4_1", 22, 4, 32, 20),
        _ggml("q5_0", 23, 5, 32, 22),
        _ggml("q5_1", 24, 5, 32, 24),
        _ggml("iq4_nl", 25, 4, 32, 18),
        _ggml("q4_k", 26, 4, 256, 144),
        _ggml("q5_k", 27, 5, 256, 176),
        _ggml("q6_k", 28, 6, 256, 210),
        _ggml("iq4_xs", 29, 4, 256, 136),
        _ggml("ggml_mxfp4", 30, 4, 32, 17),
    )
}
# Where ggml's name of a type is that of another format here.
_OTHER_NAMES = {"mxfp4": "ggml_mxfp4"}
# Those of bitsandbytes: a table of values in [-1, 1] and the largest magnitude of a flat block.
ABSMAX_FORMATS = {f.name: f for f in FORMATS.values() if f.element is None}
_BY_NUMBER = {f.number: f for f in (*FORMATS.values(), *GROUP_FORMATS.values(), *GGML_FORMATS.values())}

# Blocks that share one second-level scale in double quantisation.
SCALE_GROUP = 256


# What `quantize` calls them; the type of the scales is that of the weight.
GROUP_CODES = {"int4": "int4", "int8": "int8-packed", "fp8": "fp8-row"}
_SUFFIX_OF = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def format_named(name: str, dtype: torch.dtype = torch.bfloat16) -> Format:
    """The format called `name`, for a weight of `dtype`; the error lists the known ones."""
    if name in GROUP_CODES:
        if dtype not in _SUFFIX_OF:
            raise ValueError(f"format {name} of a weight of {dtype}, wanted bfloat16, float16 or float32")
        return GROUP_FORMATS[f"{GROUP_CODES[name]}-{_SUFFIX_OF[dtype]}"]
    found = FORMATS.get(name) or GROUP_FORMATS.get(name) or GGML_FORMATS.get(name)
    if found is None:
        known = ", ".join([*FORMATS, *GROUP_CODES, *GROUP_FORMATS, *GGML_FORMATS])
        raise ValueError(f"format is {name!r}, known are {known}")
    return found


def ggml_format(kind: str) -> Format | None:
    """The format of a type of ggml, by its name in a GGUF file in any case, or by our own."""
    return GGML_FORMATS.get(_OTHER_NAMES.get(kind.lower(), kind.lower()))


def format_numbered(number: int) -> Format:
    """The format with this number in an operator's layout."""
    if number not in _BY_NUMBER:
        raise ValueError(f"layout[0] is {number}, not the number of a packed format")
    return _BY_NUMBER[number]


_TABLES: dict[tuple[int, torch.device], torch.Tensor] = {}


def value_table(fmt: Format, device: torch.device) -> torch.Tensor:
    """The code values as float32. Made once for a device: a copy to it would make the host wait each time.

    On the CPU there is nothing to wait for, and a tracer would guard the table of tables.
    """
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(fmt.values, dtype=torch.float32, device=device)
    kept = _TABLES.get((fmt.number, device))
    if kept is None:
        kept = torch.tensor(fmt.values, dtype=torch.float32, device=device)
        if type(kept) is torch.Tensor and device.type != "meta":  # no stand-in of a tracer
            _TABLES[fmt.number, device] = kept
    return kept
