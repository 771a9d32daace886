"""dequantize against bitsandbytes' native and reference paths, the portable implementation, and misuse."""

import pytest
import torch

import monograph as mg
from monograph.ops.dequantize import portable_dequantize
from monograph.quant.quant_methods.bitsandbytes import from_quant_state
from support import bnb_reference as bnb

pytestmark = pytest.mark.per_isa  # run once for each MONOGRAPH_ISA

SHAPES = [
    (64, 4096),  # every block size divides the row
    (33, 96),  # 64 and larger straddle rows
    (7, 130),  # partial last block
    (5, 33),  # odd rows: they start inside a byte
    (1, 1),
]


def packed(shape, quant_type, block, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(shape).to(dtype)
    values, absmax = bnb.quantize(weight, block, quant_type)
    return values, absmax


def ours(values, scales, block, quant_type, shape, dtype):
    number = {"nf4": 1, "fp4": 2}[quant_type]
    scales = [s.contiguous().reshape(-1).view(torch.uint8) for s in scales]
    return torch.ops.monograph.dequantize(values, scales, [number, block, *shape], dtype)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", bnb.DTYPES)
@pytest.mark.parametrize("block", bnb.BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bitwise_equal_to_the_reference(quant_type, dtype, block, shape):
    """Plain states in three dtypes, for every block size and awkward shape."""
    values, absmax = packed(shape, quant_type, block)
    got = ours(values, [absmax], block, quant_type, shape, dtype)
    want = bnb.reference(values, absmax, block, quant_type, shape, dtype)
    assert torch.equal(bnb.bits(got), bnb.bits(want.reshape(shape)))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", bnb.DTYPES)
@pytest.mark.parametrize("block", bnb.BLOCKS)
def test_double_quantised_bitwise_equal(quant_type, dtype, block):
    """Nested states. bitsandbytes' own codes, decoded inside our kernel."""
    shape = (600, 4096)
    values, absmax = packed(shape, quant_type, block)
    parts, decoded = bnb.nested_scales(absmax)
    got = ours(values, parts, block, quant_type, shape, dtype)
    want = bnb.reference(values, decoded, block, quant_type, shape, dtype)
    assert torch.equal(bnb.bits(got), bnb.bits(want))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", bnb.DTYPES)
@pytest.mark.parametrize("block", [b for b in bnb.BLOCKS if b < 2048])
def test_bitwise_equal_to_the_native_path_where_it_agrees_with_its_reference(quant_type, dtype, block):
    shape = (64, 4096)
    values, absmax = packed(shape, quant_type, block)
    native = bnb.native(values, absmax, block, quant_type, shape, dtype)
    reference = bnb.reference(values, absmax, block, quant_type, shape, dtype)
    assert torch.equal(bnb.bits(native), bnb.bits(reference))
    assert torch.equal(bnb.bits(ours(values, [absmax], block, quant_type, shape, dtype)), bnb.bits(native))


@pytest.mark.parametrize("shape", [(1152, 4304), (64, 96)])
def test_where_bitsandbytes_native_path_is_wrong_we_follow_its_reference(shape):
    """Columns that are not a multiple of the block: bitsandbytes 0.50.2 takes scales by row on AVX-512.

    Recorded so that a fixed release is noticed. On a machine without AVX-512 its native path is right.
    """
    values, absmax = packed(shape, "nf4", 64)
    reference = bnb.reference(values, absmax, 64, "nf4", shape, torch.float32)
    assert torch.equal(ours(values, [absmax], 64, "nf4", shape, torch.float32), reference)
    native = bnb.native(values, absmax, 64, "nf4", shape, torch.float32)
    if "avx512" in torch.backends.cpu.get_cpu_capability().lower():
        assert (native != reference).float().mean() > 0.1


def test_the_portable_implementation_gives_the_same_bits():
    torch.manual_seed(1)
    for shape in [*SHAPES, (2, 3, 64), (0, 64), (4, 0)]:
        for name in ("nf4", "fp4"):
            for block in (32, 64, 4096):
                for double in (False, True):
                    w = mg.quantize(torch.randn(shape), name, block_size=block, double_quant=double)
                    for dtype in bnb.DTYPES:
                        want = portable_dequantize(w.values, w.scales, w.layout, dtype)
                        assert torch.equal(bnb.bits(w.dequantize(dtype)), bnb.bits(want)), (
                            shape,
                            name,
                            block,
                        )


def test_into_an_existing_output():
    w = mg.quantize(torch.randn(48, 96), double_quant=True)
    for dtype in bnb.DTYPES:
        out = torch.full((48, 96), float("nan"), dtype=dtype)
        assert w.dequantize(out=out) is out
        assert torch.equal(out, w.dequantize(dtype))
    with pytest.raises(RuntimeError, match="shape of out"):
        w.dequantize(out=torch.empty(96, 48))


def test_threads_do_not_change_a_bit():
    w = mg.quantize(torch.randn(1024, 1000), double_quant=True)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(w.dequantize(torch.bfloat16))
    torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


def test_transposed_weight_gives_the_transposed_result():
    """Values compared, not only shapes; also through bitsandbytes' [1, n] convention."""
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(96, 160, dtype=torch.bfloat16)
    w = mg.quantize(weight)
    assert torch.equal(w.t().dequantize(), w.dequantize().t())
    tensor, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    straight = mg.dequantize_4bit(tensor, state)
    assert straight.shape == (96, 160)
    assert torch.equal(mg.dequantize_4bit(tensor.t(), state), straight.t())
    assert torch.equal(straight, from_quant_state(tensor, state).dequantize())


def test_without_a_state_the_tensor_passes_through():
    tensor = torch.randn(3, 4)
    assert mg.dequantize_4bit(tensor) is tensor


def test_wrong_arguments_name_the_thing_found_and_wanted():
    w = mg.quantize(torch.randn(64, 64), double_quant=True)
    call = torch.ops.monograph.dequantize
    scales = list(w.scales)
    with pytest.raises(RuntimeError, match=r"values has 2047 bytes, wanted 2048"):
        call(w.values.reshape(-1)[1:], scales, w.layout, torch.float32)
    with pytest.raises(RuntimeError, match=r"values has dtype float32, wanted uint8"):
        call(torch.zeros(512), scales, w.layout, torch.float32)
    with pytest.raises(RuntimeError, match=r"scales has 2 tensors"):
        call(w.values, scales[:2], w.layout, torch.float32)
    with pytest.raises(RuntimeError, match=r"scales\[1\] \(groups\) has 8 bytes, wanted 4"):
        call(w.values, [scales[0], scales[1].repeat(2), *scales[2:]], w.layout, torch.float32)
    with pytest.raises(RuntimeError, match=r"layout\[0\] is 99"):
        call(w.values, scales, [99, 64, 64, 64], torch.float32)
    with pytest.raises(RuntimeError, match=r"negative dimension -64"):
        call(w.values, scales, [1, 64, -64, 64], torch.float32)
    with pytest.raises(RuntimeError, match=r"dtype float64"):
        call(w.values, scales, w.layout, torch.float64)
    with pytest.raises(RuntimeError, match=r"too many elements"):
        call(w.values, scales, [1, 64, 2**40, 2**40], torch.float32)
