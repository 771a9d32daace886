"""Layouts with an origin or grids of their own: a slice of any weight is its rows, in every operator."""

import pytest
import torch
from torch.library import opcheck

import monograph as mg
from monograph.ops.dequantize import portable_dequantize
from monograph.ops.layout import join_layouts, make_layout, read_layout, split_layouts
from monograph.ops.linear import linear, linear_dx
from monograph.ops.linear_shared import linear_shared

pytestmark = pytest.mark.per_isa
ops = torch.ops.monograph
# Rows that begin inside bytes, blocks, groups of 256 blocks and square blocks; matrices that are no whole
# number of blocks.
CASES = [
    ("nf4", (7, 33), {"block_size": 32}),
    ("nf4", (60, 149), {"block_size": 32, "double_quant": True}),
    ("fp4", (3, 5, 21), {"double_quant": True}),
    ("mxfp4", (3, 4, 96), {}),
    ("mxfp8", (9, 64), {}),
    ("nvfp4", (3, 5, 48), {}),
    ("nvfp4-divide", (9, 64), {}),
    ("fp8-block", (260, 40), {"scale_type": "bfloat16"}),
    ("fp8-block", (3, 130, 40), {}),
]


def packed(name: str, shape: tuple[int, ...], options: dict) -> mg.PackedWeight:
    return mg.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)), name, **options)


@pytest.mark.parametrize(("name", "shape", "options"), CASES)
def test_a_slice_is_the_rows_of_the_whole_from_every_start(name, shape, options):
    w = packed(name, shape, options)
    whole = w.dequantize(torch.float32).reshape(-1, shape[-1])
    matrix = shape[-2] if len(shape) > 2 and name not in ("nf4", "fp4") else whole.shape[0]
    for first in range(0, whole.shape[0]):
        count = min(1 + first % 7, matrix - first % matrix)
        part = w.slice_rows(first, count)
        assert part.shape == (count, shape[-1])
        assert part.values.untyped_storage().data_ptr() == w.values.untyped_storage().data_ptr()
        rows = whole[first : first + count]
        assert torch.equal(part.dequantize(torch.float32), rows), (first, count)
        arguments = (part.values, list(part.scales), part.layout)
        if first % 5 == 0:
            assert torch.equal(portable_dequantize(*arguments, torch.float32), rows)
            out = torch.empty_like(rows)
            assert torch.equal(part.dequantize(out=out), rows)
    # And a slice of a slice.
    part = w.slice_rows(matrix - 4, 4).slice_rows(1, 2)
    assert torch.equal(part.dequantize(torch.float32), whole[matrix - 3 : matrix - 1])


@pytest.mark.parametrize(("name", "shape", "options"), CASES[1::3])
def test_linear_takes_a_slice(name, shape, options):
    w = packed(name, shape, options)
    for first, count in ((0, 2), (1, 3)):
        part = w.slice_rows(first, count)
        arguments = (part.values, list(part.scales), part.layout)
        dense = part.dequantize(torch.float32)
        x, dy = torch.randn(3, shape[-1]), torch.randn(3, count)
        plain = make_layout(0, 0, dense.shape)
        assert torch.equal(linear(x, *arguments), linear(x, dense, [], plain))
        assert torch.equal(linear_dx(dy, *arguments), linear_dx(dy, dense, [], plain))
        both = linear_shared(x, [w.slice_rows(0, 1).values, part.values], *_lists(w.slice_rows(0, 1), part))
        assert torch.equal(both[1], linear(x, *arguments))
        x.requires_grad_()
        linear(x, *arguments).sum().backward()
        assert torch.equal(x.grad, linear_dx(torch.ones(3, count), dense, [], plain))


def _lists(*weights: mg.PackedWeight) -> tuple[list, list]:
    return [list(w.scales) for w in weights], [w.layout for w in weights]


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("nf4", (5, 21), {"double_quant": True}),  # half a byte and half a block are left over
        ("nf4", (60, 149), {"double_quant": True, "block_size": 32}),
        ("nvfp4", (4, 48), {}),
        ("fp8-block", (130, 40), {}),
    ],
)
def test_matrices_that_were_quantised_one_by_one_keep_their_own_grids(name, shape, options):
    parts = [mg.quantize((i + 1) * torch.randn(shape), name, **options) for i in range(4)]
    joined = [
        torch.cat([s.reshape(-1) for s in column]) for column in zip(*(p.scales for p in parts), strict=True)
    ]
    if options.get("double_quant"):
        joined[2] = parts[0].scales[2]
    values = torch.cat([p.values.reshape(-1) for p in parts])
    first = parts[0]
    stacked = (2, 2 * shape[0], shape[1])  # two experts, gate and up within each
    w = mg.PackedWeight(
        first.format, stacked, first.block_size, values, tuple(joined), first.dtype, grid_rows=shape[0]
    )
    assert w.layout == [-1, first.format.number, first.block_size, 3, *stacked, 0, shape[0]]
    want = torch.stack([p.dequantize(torch.float32) for p in parts]).reshape(stacked)
    assert torch.equal(w.dequantize(torch.float32), want)
    assert torch.equal(portable_dequantize(values, joined, w.layout, torch.float32), want)
    up = w.slice_rows(3 * shape[0] + 1, 2)
    assert torch.equal(up.dequantize(torch.float32), want.reshape(-1, shape[1])[3 * shape[0] + 1 :][:2])
    with pytest.raises(ValueError, match=f"lie in more than one matrix of {shape[0]} rows"):
        w.slice_rows(shape[0] - 1, 2)


def test_opcheck_of_a_slice():
    w = packed("nf4", (7, 33), {"block_size": 32}).slice_rows(3, 4)
    arguments = (w.values, list(w.scales), w.layout)
    assert w.layout == [-1, 1, 32, 2, 4, 33, 3, 0]
    opcheck(ops.dequantize, (*arguments, torch.float32))
    opcheck(ops.linear, (torch.randn(2, 33), *arguments, None, None, None, None))
    opcheck(
        ops.linear_shared, (torch.randn(2, 33), [w.values], list(w.scales), [*w.layout, 1], [], [], [], [])
    )


def test_layouts_that_are_no_layouts_are_refused_by_every_reader():
    w = packed("mxfp4", (4, 64), {})
    values, scales = w.values, list(w.scales)
    cases = [
        ([-2, 3, 32, 2, 4, 64, 0, 0], "layout has version -2, wanted -1"),
        ([-1, 3, 32, 3, 4, 64, 0, 0], r"layout has 8 entries, wanted \[-1, format"),
        ([-1, 3, 32, 0, 4, 64, 0, 0], r"layout has 8 entries, wanted \[-1, format"),
        ([-1, 3, 32, 2, 4, 64, 0, 0, 0], "layout has 9 entries, wanted 8"),
        ([-1, 3, 32, 2, 4, 64, -64, 0], "layout has the origin -64, wanted 0 or more"),
        ([-1, 3, 32, 2, 4, 64, 0, -1], "layout has grids of -1 rows"),
        ([-1, 3, 32, 2, 4, 64, 64, 2], "layout has the origin 64 and grids of 2 rows, wanted one"),
        ([-1, 3, 32, 2, 4, 64, 0, 3], "a grid has 3 rows, wanted a part of the weight's 4"),
        ([-1, 3, 32, 2, 3, 64, 32, 0], "the origin is 32"),
        ([-1, 3, 32, 2, 4, 64, 64, 0], "values has 128 bytes, wanted 160"),
        ([-1, 99, 32, 2, 4, 64, 0, 0], "is 99, not the number of a packed format"),
        ([-1, 3, 32, 3, 1, 4, 64, 64, 0], "wanted"),
    ]
    for layout, message in cases:
        for call in (ops.dequantize, portable_dequantize):
            with pytest.raises((RuntimeError, ValueError), match=message):
                call(values, scales, layout, torch.float32)
    with pytest.raises(RuntimeError, match="the weight has 2 grids, wanted 1"):
        linear(torch.randn(2, 64), values, scales, [-1, 3, 32, 2, 4, 64, 0, 2])
    with pytest.raises(RuntimeError, match="the weight has 3 dimensions, wanted 2"):
        linear(torch.randn(2, 64), values, scales, [-1, 3, 32, 3, 1, 4, 64, 0, 0])
    with pytest.raises(RuntimeError, match="a plain weight has an origin or grids"):
        linear(torch.randn(2, 64), torch.randn(4, 64), [], [-1, 0, 0, 2, 4, 64, 64, 0])


def test_lists_of_layouts_may_mix_both_forms():
    old, new = [1, 64, 4, 64], [-1, 1, 64, 2, 4, 64, 0, 0]
    numbers = join_layouts([old, new], [1, 4])
    assert [(list(own), count) for own, count in split_layouts("x", numbers, 2)] == [(old, 1), (new, 4)]
    assert read_layout("x", old) == read_layout("x", new)
    for wrong, weights in ((numbers, 1), (numbers, 3), (numbers[:-1], 2), ([], 0)):
        with pytest.raises(ValueError, match=r"^x: layouts "):
            split_layouts("x", wrong, weights)


def test_only_a_whole_weight_is_written_as_bitsandbytes_does():
    weight = mg.quantize(torch.randn(65, 96), "nf4")
    with pytest.raises(ValueError, match="begins 32 elements after its bytes"):
        mg.to_bitsandbytes(weight.slice_rows(7, 26), "w")
    first = weight.slice_rows(0, 26)
    back = mg.from_bitsandbytes(mg.to_bitsandbytes(first, "w"), "w")
    assert torch.equal(back.dequantize(torch.float32), weight.dequantize(torch.float32)[:26])
