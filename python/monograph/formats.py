"""The packed formats by name: their numbers in operator schemas, block sizes and code tables.

The numbers and tables are those of core/formats; tests/python/test_formats.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One packed format. `values[code]` times the scale of the block is the element."""

    name: str
    number: int
    bits: int
    block_sizes: tuple[int, ...]
    values: tuple[float, ...]
    order: tuple[int, ...]  # order[i] is the code of the i-th smallest value

    def check_block(self, block: int) -> None:
        if block not in self.block_sizes:
            raise ValueError(f"block size is {block}, format {self.name} wants one of {self.block_sizes}")


_FOUR_BIT_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4_TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)

NF4 = Format("nf4", 1, 4, _FOUR_BIT_BLOCKS, _NF4_VALUES, tuple(range(16)))
FP4 = Format("fp4", 2, 4, _FOUR_BIT_BLOCKS, tuple(x / 12 for x in _FP4_TWELFTHS), _FP4_ORDER)
FORMATS = {f.name: f for f in (NF4, FP4)}
_BY_NUMBER = {f.number: f for f in FORMATS.values()}

# Blocks that share one second-level scale in double quantisation.
SCALE_GROUP = 256


def format_named(name: str) -> Format:
    """The format called `name`; the error lists the known ones."""
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}, known are {', '.join(FORMATS)}")
    return FORMATS[name]


def format_numbered(number: int) -> Format:
    """The format with this number in an operator's layout."""
    if number not in _BY_NUMBER:
        raise ValueError(f"layout[0] is {number}, not the number of a packed format")
    return _BY_NUMBER[number]


def value_table(fmt: Format, device: torch.device) -> torch.Tensor:
    """The code values as float32."""
    return torch.tensor(fmt.values, dtype=torch.float32, device=device)
