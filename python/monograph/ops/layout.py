"""The layout of a packed weight: the plain numbers that stand beside its tensors in every schema.

    [format, block, *shape]
    [-1, format, block, dimensions, *shape, origin, grid_rows]

The second form is told by its negative first number, a version. `origin` and `grid_rows` are for weights that
were cut or put together; with both 0 the first form says the same, and it is what `make_layout` then gives.
`ops/arguments/packed.h` is the same reader for the kernels on the CPU.

    [-2, scales of gate, length, *layout of gate, *layout of up]

is of experts alone: gate and up are two stacks, in one list of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from monograph.ops.formats import BlockShape, Format

PLAIN = 0  # the format number of a weight that is not packed
_VERSION, _PAIR = -1, -2
_BEFORE, _BEHIND = 4, 2  # numbers before and behind the shape
_SHARED = 5  # numbers a weight in a list without versions: format, block, rows, cols, number of scales


@dataclass(frozen=True)
class Layout:
    """`origin`: so many elements before the weight its values and scales begin, with a block and with a group
    of 256 blocks; whole rows of one matrix where blocks know rows. `grid_rows`: matrices of so many rows were
    quantised one by one, and blocks, groups, offsets and tensor scales start anew with each; 0 for one grid.
    """

    format: int
    block: int
    shape: tuple[int, ...]
    origin: int = 0
    grid_rows: int = 0

    def stored_shape(self, fmt: Format) -> tuple[int, ...]:
        """The shape of all elements that values and scales hold, those before the origin too."""
        if self.origin == 0:
            return self.shape
        if fmt.shape is BlockShape.FLAT:
            return (self.origin + prod(self.shape),)
        *_, rows, cols = (1, *self.shape)
        return self.origin // max(cols, 1) + rows, cols


def make_layout(
    format: int, block: int, shape: Sequence[int], origin: int = 0, grid_rows: int = 0
) -> list[int]:
    """The numbers of a layout, in the shorter form where it says all."""
    if origin == 0 and grid_rows == 0:
        return [format, block, *shape]
    return [_VERSION, format, block, len(shape), *shape, origin, grid_rows]


def plain_layout(shape: Sequence[int]) -> list[int]:
    """Of a dense matrix in a place where packed ones stand too."""
    return make_layout(PLAIN, 0, shape)


def _refuse(op: str, message: str) -> None:
    raise ValueError(f"{op}: {message}")


def _take(op: str, numbers: Sequence[int], dimensions: int) -> tuple[Layout, int]:
    """The layout at the front of `numbers` and its length; without a version it has `dimensions`."""
    # Short ones have no version; sizes may be symbols, and looking at them would become a guard.
    if len(numbers) <= _BEFORE + _BEHIND or numbers[0] >= 0:
        return Layout(numbers[0], numbers[1], tuple(numbers[2 : 2 + dimensions])), 2 + dimensions
    version, number, block, dimensions = numbers[:_BEFORE]
    if version != _VERSION:
        _refuse(op, f"layout has version {version}, wanted {_VERSION} or the number of a format")
    if not 1 <= dimensions <= len(numbers) - _BEFORE - _BEHIND:
        form = "[-1, format, block, dimensions, *shape, origin, grid_rows] with at least one dimension"
        _refuse(op, f"layout has {len(numbers)} entries, wanted {form}")
    end = _BEFORE + dimensions
    origin, grid_rows = numbers[end : end + _BEHIND]
    if origin < 0:
        _refuse(op, f"layout has the origin {origin}, wanted 0 or more")
    if grid_rows < 0:
        _refuse(op, f"layout has grids of {grid_rows} rows, wanted 0 for one grid or more")
    if origin and grid_rows:
        _refuse(op, f"layout has the origin {origin} and grids of {grid_rows} rows, wanted one of them")
    layout = Layout(number, block, tuple(numbers[_BEFORE:end]), origin, grid_rows)
    return layout, end + _BEHIND


def read_layout(op: str, numbers: Sequence[int]) -> Layout:
    """One layout; `op` is for the error."""
    if len(numbers) < 3:
        _refuse(op, f"layout has {len(numbers)} entries, wanted [format, block, *shape]")
    layout, length = _take(op, numbers, len(numbers) - 2)
    if length != len(numbers):
        _refuse(op, f"layout has {len(numbers)} entries, wanted {length}")
    return layout


def read_matrix(op: str, numbers: Sequence[int]) -> Layout:
    """The same of a weight with two dimensions and one grid."""
    if len(numbers) != 4 and not (len(numbers) > _BEFORE + _BEHIND and numbers[0] < 0):
        _refuse(op, f"layout has {len(numbers)} entries, wanted [format, block, rows, cols]")
    layout = read_layout(op, numbers)
    if len(layout.shape) != 2:
        _refuse(op, f"the weight has {len(layout.shape)} dimensions, wanted 2")
    return layout


def pair_layout(gate: Sequence[int], scales: int, up: Sequence[int]) -> list[int]:
    """Gate and up of experts as two stacks; `scales` tensors are gate's, behind them come the values and the
    scales of up."""
    return [_PAIR, scales, len(gate), *gate, *up]


def split_pair(op: str, numbers: Sequence[int]) -> tuple[Sequence[int], int, Sequence[int]] | None:
    """What `pair_layout` joined; None for the layout of one stack."""
    if len(numbers) < 3 or numbers[0] != _PAIR:
        return None
    _, scales, length, *both = numbers
    if not 0 <= length <= len(both):
        form = "[-2, scales of gate, length, *layout of gate, *layout of up]"
        _refuse(op, f"layout1 has {len(numbers)} entries, wanted {form}")
    return both[:length], scales, both[length:]


def join_layouts(layouts: Sequence[Sequence[int]], scales: Sequence[int]) -> list[int]:
    """The layouts of several weights in one list, each with its number of scales behind it."""
    return [n for layout, count in zip(layouts, scales, strict=True) for n in (*layout, count)]


def split_layouts(op: str, numbers: Sequence[int], weights: int) -> list[tuple[Sequence[int], int]]:
    """What `join_layouts` joined: (layout, number of scales) of each weight."""
    versioned = len(numbers) > _SHARED * weights  # each layout with a version is longer
    if weights == 0 or not (versioned or len(numbers) == _SHARED * weights):
        wanted = f"wanted {_SHARED} for each of the {weights} weights"
        _refuse(op, f"layouts has {len(numbers)} entries, {wanted}")
    parts, rest = [], numbers
    for i in range(weights):
        length = 4 if not versioned or len(rest) < _SHARED else _take(op, rest, 2)[1]
        if length >= len(rest):
            _refuse(op, f"layouts ends before the number of scales of weight {i}")
        parts.append((rest[:length], rest[length]))
        rest = rest[length + 1 :]
    if rest:
        wanted = f"wanted {_SHARED} for each of the {weights} weights"
        _refuse(op, f"layouts has {len(numbers)} entries, {wanted} or a version in front of each")
    return parts
