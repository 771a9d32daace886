"""Quantising to int4, int8 and FP8 by row: what compressed-tensors itself computes, bit by bit."""

import pytest
import torch

import monograph as mg
from monograph.ops.formats import GROUP_FORMATS, RULES, ZeroPoints, format_named
from monograph.ops.quantize import portable_quantize
from support.producer_groups import CODES, DTYPES, compressed, producer_parts

pytestmark = pytest.mark.per_isa  # run once for each MONOGRAPH_ISA

SHAPES = ((133, 500, 0), (133, 500, 20), (40, 512, 128), (19, 256, 32), (7, 9, 3), (1, 640, 128), (3, 8, 1))


def refusal(call, *args, **named):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as error:
        call(*args, **named)
    return str(error.value)


def hard(shape, dtype, seed=0):
    """Rows of all magnitudes, ties of every code, rows of zeros, of one sign and with a large element."""
    torch.manual_seed(seed)
    rows = shape[0]
    exponents = torch.arange(rows) % 12 - 6
    weight = torch.randn(shape) * torch.exp2(exponents.float())[:, None]
    ties = torch.randint(-30, 31, shape) / 4.0
    weight[::3] = ties[::3] * torch.exp2(exponents.float())[::3, None]
    weight[1::5] = weight[1::5].abs()
    weight[2::7] = -weight[2::7].abs()
    weight[3::11] = 0.0
    weight[5::13, 0] *= 200
    return weight.to(dtype)


def same_as_the_producer(weight, code, block, symmetric):
    rule = "default" if symmetric else "minmax"
    ours = mg.quantize(weight, code, block_size=block, rule=rule)
    theirs = producer_parts(weight, code, block, symmetric)
    parts = (ours.values, *ours.scales)
    assert len(parts) == len(theirs)
    for name, mine, want in zip(("values", "scales", "zeros"), parts, theirs, strict=False):
        differ = (mine.reshape(-1) != want).sum()
        assert differ == 0, (name, code, block, symmetric, weight.dtype, list(weight.shape), int(differ))
    return ours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("code", "symmetric"), CODES)
def test_scales_zero_points_and_codes_are_the_producers(code, symmetric, dtype):
    for rows, cols, block in SHAPES:
        same_as_the_producer(hard((rows, cols), dtype), code, 0 if code == "fp8" else block, symmetric)
    torch.manual_seed(1)
    large = (torch.randn(512, 2048) * 0.02).to(dtype)  # a million
    same_as_the_producer(large, code, 0 if code != "int4" else 128, symmetric)


@pytest.mark.parametrize(("code", "symmetric"), CODES)
def test_all_bf16_and_fp16_numbers(code, symmetric):
    """Every finite number beside 1, its own neighbours and 0, in rows of its magnitude and of all."""
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        every = every[every.isfinite()]
        # The producer's scale overflows where a group spans more than the type does.
        if not symmetric:
            every = every[every.float().abs() <= torch.finfo(dtype).max / 4]
        every = every[: every.numel() // 64 * 64].reshape(-1, 64)
        same_as_the_producer(every.contiguous(), code, 0, symmetric)
        mixed = every.t().contiguous()
        same_as_the_producer(mixed, code, 0, symmetric)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("code", "symmetric"), CODES)
def test_it_decodes_as_the_producer_does(code, symmetric, dtype):
    weight = hard((48, 512), dtype, seed=3)
    block = 0 if code == "fp8" else 128
    ours = mg.quantize(weight, code, block_size=block, rule="default" if symmetric else "minmax")
    again = compressed(weight, code, block, symmetric).decompressed()
    assert again.dtype == dtype
    assert torch.equal(ours.dequantize(dtype), again)
    step = ours.scales[0].reshape(-1).view(getattr(torch, ours.format.scale_types[0])).float()
    limit = step.reshape(48, -1).repeat_interleave(ours.block_size, 1) * (32.1 if code == "fp8" else 1.26)
    assert ((ours.dequantize(torch.float32) - weight.float()).abs() <= limit).all()


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_the_portable_implementation_gives_the_same_bits(name):
    fmt = GROUP_FORMATS[name]
    rules = (0,) if fmt.zero_points is ZeroPoints.NONE else (0, RULES["minmax"])
    bad = hard((12, 60), torch.float32)
    bad[::5, 3], bad[1::5, 4], bad[2::5, 5] = float("nan"), float("inf"), float("-inf")
    bad[11] = float("nan")
    for rule in rules:
        for dtype in DTYPES if fmt.scale_types[0] != "float16" else (torch.float16,):
            for rows, cols, block in (*SHAPES, (0, 64, 32), (4, 0, 8)):
                args = (fmt.number, block or cols, False, False, rule)
                weight = hard((rows, cols), dtype) if rows * cols else torch.zeros(rows, cols, dtype=dtype)
                got = torch.ops.monograph.quantize(weight, *args)
                want = portable_quantize(weight, *args)
                fake = torch.ops.monograph.quantize(weight.to("meta"), *args)
                assert [t.shape for t in fake] == [t.shape for t in got]
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (rule, dtype, rows)
            args = (fmt.number, 20, False, True, rule)
            got, want = (f(bad.to(dtype), *args) for f in (torch.ops.monograph.quantize, portable_quantize))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (rule, dtype)


@pytest.mark.parametrize(("code", "symmetric"), CODES)
def test_what_is_not_finite_is_named_or_saturates(code, symmetric):
    rule = "default" if symmetric else "minmax"
    for bad in (float("nan"), float("inf"), float("-inf")):
        for row, col in ((0, 0), (5, 37), (15, 63)):
            weight = torch.randn(16, 64, dtype=torch.bfloat16)
            weight[row, col] = bad
            error = refusal(mg.quantize, weight, code, block_size=0, rule=rule)
            assert f"input is not finite at flat index {row * 64 + col}" in error
            left_out = weight.clone()
            left_out[row, col] = 0.0
            packed = mg.quantize(weight, code, block_size=0, rule=rule, nonfinite="saturate")
            want = mg.quantize(left_out, code, block_size=0, rule=rule)
            assert all(torch.equal(a, b) for a, b in zip(packed.scales, want.scales, strict=True))
            got, plain = packed.dequantize(torch.float32), want.dequantize(torch.float32)
            if bad != bad:
                assert torch.equal(got, plain)
            else:
                assert got[row, col] == (got[row].max() if bad > 0 else got[row].min())
                got[row, col] = plain[row, col] = 0.0
                assert torch.equal(got, plain)


def test_a_range_wider_than_its_type_has_a_scale():
    """The producer's own scale is infinite there, and its weight NaN."""
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        weight = torch.tensor([[largest, -largest, largest / 2, 0.0] * 8], dtype=dtype)
        assert compressed(weight, "int4", 0, False).decompressed().isnan().any()
        packed = mg.quantize(weight, "int4", block_size=0, rule="minmax")
        scale = packed.scales[0].reshape(-1).view(dtype).double()
        assert ((scale - largest / 7.5).abs() <= 0.01 * largest).all()
        if dtype is torch.float16:  # others reach the end of fp32 itself
            back = packed.dequantize(torch.float32)
            assert ((back - weight.float()).abs() <= scale).all()


@pytest.mark.parametrize(("code", "block"), [("int4", 32), ("int4", 0), ("int8", 0), ("fp8", 0)])
def test_a_stack_has_the_values_of_its_matrices(code, block):
    matrices = torch.randn(3, 8, 64)
    stack = mg.quantize(matrices, code, block_size=block).dequantize(torch.float32)
    alone = [mg.quantize(one, code, block_size=block).dequantize(torch.float32) for one in matrices]
    assert torch.equal(stack, torch.stack(alone))


def test_refusals():
    weight = torch.randn(8, 500)
    wanted = "rows have 500 elements, format int4-fp32 wants a multiple of 128"
    assert wanted in refusal(mg.quantize, weight, "int4")
    assert "rule is 'minmax', format fp8-row-fp32 wants" in refusal(mg.quantize, weight, "fp8", rule="minmax")
    assert "rule is 'floor', format int4-fp32 wants" in refusal(mg.quantize, weight, "int4", rule="floor")
    assert "block size is -1" in refusal(mg.quantize, weight, "int8", block_size=-1)
    for block in (True, 4.0, "128"):
        assert f"block size is {block!r}, wanted a whole" in refusal(
            mg.quantize, weight, "int4", block_size=block
        )
    for dtype in (torch.float64, torch.int32):
        assert f"of {dtype}, wanted bfloat16" in refusal(mg.quantize, weight.to(dtype), "int8")
    assert "no dimension" in refusal(mg.quantize, torch.tensor(1.0), "fp8")
    for call in (torch.ops.monograph.quantize, portable_quantize):
        for dtype in (torch.float32, torch.bfloat16):  # the scale of such a weight may lie beyond 65504
            said = refusal(call, weight.to(dtype) * 1e7, format_named("int4-fp16").number, 500, False, True)
            assert "int4-fp16 has scales in float16, input is" in said
    number = format_named("int4").number
    call = torch.ops.monograph.quantize
    assert "block size is 0" in refusal(call, weight, number, 0, False, False)
    assert "no double quantisation" in refusal(call, weight, number, 500, True, False)
    assert "rule is 4" in refusal(call, weight, number, 500, False, False, 4)
    assert "scale_bytes is 4" in refusal(call, weight, number, 500, False, False, 0, 4)
    split = torch.ops.monograph.split_quantize
    assert "groups of a row" in refusal(split, weight, [8], number, 500, True, False, False, 0)
