"""MXFP4, MXFP8, NVFP4 and FP8 blocks: the portable implementation, tails, experts, the graph, misuse."""

import pytest
import torch
from torch.library import opcheck

import monograph as mg
from monograph.nn import QuantLinear
from monograph.ops.dequantize import portable_dequantize
from monograph.ops.formats import ABSMAX_FORMATS, FORMATS
from monograph.ops.linear import linear, linear_dx
from monograph.ops.quantize import portable_quantize

pytestmark = pytest.mark.per_isa  # run once for each MONOGRAPH_ISA

NAMES = [name for name in FORMATS if name not in ABSMAX_FORMATS]
CASES = [(name, kind) for name in NAMES for kind in FORMATS[name].scale_types]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hard_weight(*shape):
    """Many magnitudes, ties, signed zeros and whole blocks of zeros."""
    torch.manual_seed(len(shape) + shape[-1])
    weight = torch.randn(shape) * torch.exp2(torch.randint(-20, 8, (*shape[:-1], 1)))
    weight = torch.where(torch.rand(shape) < 0.3, (weight * 8).round() / 8, weight)
    weight[..., :32] = -0.0
    return weight


def bits(tensor):
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_portable_implementation_gives_the_same_bits(name, kind):
    fmt = FORMATS[name]
    for shape in ((40, 96), (192, 576), (3, 130, 96), (1, 64), (96,), (0, 64)):
        weight = hard_weight(*shape) if 0 not in shape else torch.zeros(shape)
        weight = weight.bfloat16() if len(shape) == 3 else weight
        for rule in fmt.rules:
            w = mg.quantize(weight, name, rule=rule, scale_type=kind)
            numbers = (fmt.rule_number(rule), fmt.scale_bytes(kind))
            want = portable_quantize(weight, fmt.number, w.block_size, False, False, *numbers)
            pairs = zip((w.values, *w.scales), want, strict=True)
            assert all(torch.equal(a.reshape(-1), b) for a, b in pairs), (shape, rule)
        for out in DTYPES:
            want = portable_dequantize(w.values, w.scales, w.layout, out)
            assert torch.equal(bits(w.dequantize(out)), bits(want)), (shape, out)


@pytest.mark.parametrize("name", NAMES)
def test_non_finite_values(name):
    weight = torch.randn(130, 256)
    weight[129, 3], weight[7, 200] = float("nan"), float("inf")
    with pytest.raises(RuntimeError, match=f"not finite at flat index {7 * 256 + 200}"):
        mg.quantize(weight, name)
    fmt = FORMATS[name]
    w = mg.quantize(weight, name, nonfinite="saturate")
    want = portable_quantize(weight, fmt.number, w.block_size, False, True)
    assert all(torch.equal(a.reshape(-1), b) for a, b in zip((w.values, *w.scales), want, strict=True))
    back = w.dequantize()
    assert back.isfinite().all()
    assert back[129, 3] == 0
    finite = mg.quantize(torch.where(weight.isfinite(), weight, 0.0), name)
    assert torch.equal(finite.scales[0], w.scales[0])


@pytest.mark.parametrize("kind", FORMATS["fp8-block"].scale_types)
@pytest.mark.parametrize("shape", [(192, 192), (576, 130), (128, 4304), (4304, 64), (2, 192, 300)])
def test_partial_blocks_follow_the_grid_of_128(shape, kind):
    """192 rows are blocks of 128 and 64, never two of 96; each expert has its own grid."""
    weight = hard_weight(*shape)
    w = mg.quantize(weight, "fp8-block", scale_type=kind)
    grid = [*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)]
    size = {"float32": 4, "bfloat16": 2, "e8m0": 1}[kind]
    assert w.scales[0].shape == (*grid[:-1], grid[-1] * size)
    stored = w.scales[0].reshape(-1).clone()
    if kind == "e8m0":
        scales = torch.exp2(stored.double() - 127).float()
    else:
        scales = stored.view(getattr(torch, kind)).float()
    scales = scales.reshape(grid)
    values = w.values.view(torch.float8_e4m3fn).float().reshape(shape)
    back = w.dequantize(torch.float32)
    for i in range(grid[-2]):
        for j in range(grid[-1]):
            part = (..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scale = scales[..., i, j].reshape([*shape[:-2], 1, 1])
            assert torch.equal(back[part], values[part] * scale)
            largest = weight[part].abs().amax((-2, -1))
            assert bool((largest <= 448 * 1.004 * scales[..., i, j]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_linear_and_its_gradient_are_those_of_the_dequantised_weight(name, dtype):
    """Errors against float64, pooled over shapes: at most 1.05 of F.linear's on the dequantised weight."""
    totals = torch.zeros(4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 24, 96), (33, 130, 128), (1, 64, 320), (17, 40, 32), (48, 192, 576)]
    shapes += [(7, 50, 77), (3, 129, 257)] if name == "fp8-block" else []
    for m, n, k in shapes * 3:
        w = mg.quantize(torch.randn(n, k, generator=generator) * 0.1, name)
        dense = w.dequantize(dtype)
        x = torch.randn(m, k, generator=generator).to(dtype).requires_grad_()
        dy = torch.randn(m, n, generator=generator).to(dtype)
        y = linear(x, w.values, list(w.scales), w.layout)
        y.backward(dy)
        pairs = (
            (y, torch.nn.functional.linear(x, dense), x.double() @ dense.double().t()),
            (x.grad, dy @ dense, dy.double() @ dense.double()),
        )
        errors = [
            ((t.double() - exact) / (exact.norm() + 1e-30)).norm() ** 2
            for got, baseline, exact in pairs
            for t in (got, baseline)
        ]
        totals += torch.stack(errors).detach()
    ours, plain, ours_dx, plain_dx = totals.sqrt().tolist()
    assert ours <= 1.05 * plain, (ours, plain)
    assert ours_dx <= 1.05 * plain_dx, (ours_dx, plain_dx)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_every_batch_and_for_any_threads(name):
    w = mg.quantize(torch.randn(160, 320), name)
    arguments = (w.values, list(w.scales), w.layout)
    before = torch.get_num_threads()
    try:
        for dtype in DTYPES:
            x, dy = torch.randn(300, 320).to(dtype), torch.randn(300, 160).to(dtype)
            torch.set_num_threads(1)
            y, dx = linear(x, *arguments), linear_dx(dy, *arguments)
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                for m in (1, 16, 17, 300):
                    assert torch.equal(linear(x[:m], *arguments), y[:m]), (threads, m)
                    assert torch.equal(linear_dx(dy[:m], *arguments), dx[:m]), (threads, m)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_opcheck_and_one_graph(name, kind):
    weight = torch.randn(48, 96)
    fmt = FORMATS[name]
    w = mg.quantize(weight, name, scale_type=kind)
    arguments = (w.values, list(w.scales), w.layout)
    x = torch.randn(3, 96, requires_grad=True)
    ops = torch.ops.monograph
    opcheck(ops.quantize, (weight, fmt.number, w.block_size, False, False, 0, fmt.scale_bytes(kind)))
    opcheck(ops.dequantize, (*arguments, torch.bfloat16))
    opcheck(ops.linear, (x, *arguments, None, None, None, None))
    opcheck(ops.linear_dx, (torch.randn(3, 48), *arguments, None, None))

    def step(x):
        return mg.linear(x, w).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compiled(x).backward()
    got, x.grad = x.grad, None
    step(x).backward()
    torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_quant_linear_carries_it(name, kind):
    torch.manual_seed(0)
    dense = torch.nn.Linear(96, 64, dtype=torch.bfloat16)
    layer = QuantLinear.from_linear(dense, name, scale_type=kind)
    x = torch.randn(5, 96, dtype=torch.bfloat16)
    want = torch.nn.functional.linear(x, layer.dequantize(), dense.bias)
    assert (layer(x) - want).norm() <= 2**-7 * want.norm()
    other = QuantLinear.from_linear(torch.nn.Linear(96, 64, dtype=torch.bfloat16), name, scale_type=kind)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantize(), layer.dequantize())
    stored = {n: t for n, t in layer.float().state_dict().items() if n != "bias"}
    assert set(stored) == {"values", *FORMATS[name].scale_names}
    assert all(t.dtype == torch.uint8 for t in stored.values())


def test_single_level_nvfp4_and_experts_with_one_tensor_scale():
    w = mg.quantize(torch.randn(2, 8, 32), "nvfp4")
    assert w.scales[1].numel() == 8  # one number an expert
    alone = torch.ops.monograph.dequantize(w.values, [w.scales[0]], w.layout, torch.float32)
    tensor = w.scales[1].clone().view(torch.float32)
    torch.testing.assert_close(alone * tensor.reshape(2, 1, 1), w.dequantize())
    shared = torch.ops.monograph.dequantize(w.values, [w.scales[0], w.scales[1][:4]], w.layout, torch.float32)
    torch.testing.assert_close(shared, alone * tensor[0])


def test_wrong_arguments_name_the_thing_found_and_wanted():
    with pytest.raises(RuntimeError, match="rows have 48 elements, format mxfp4 wants a multiple of 32"):
        mg.quantize(torch.randn(4, 48), "mxfp4")
    with pytest.raises(RuntimeError, match="format mxfp8 has no double quantisation"):
        mg.quantize(torch.randn(4, 64), "mxfp8", double_quant=True)
    with pytest.raises(ValueError, match="block size is 64, format nvfp4 wants one of"):
        mg.quantize(torch.randn(4, 64), "nvfp4", block_size=64)
    w = mg.quantize(torch.randn(4, 64), "nvfp4")
    with pytest.raises(RuntimeError, match=r"scales has 3 tensors, format nvfp4 wants 1 \(blocks\) or 2"):
        torch.ops.monograph.dequantize(w.values, [*w.scales, w.scales[1]], w.layout, torch.float32)
    with pytest.raises(RuntimeError, match=r"scales\[0\] \(block scales\) has 8 bytes, wanted 16"):
        torch.ops.monograph.dequantize(w.values, [w.scales[0][:2], w.scales[1]], w.layout, torch.float32)
    with pytest.raises(RuntimeError, match=r"scales\[1\] has dtype float32, wanted uint8"):
        torch.ops.monograph.dequantize(w.values, [w.scales[0], torch.ones(1)], w.layout, torch.float32)
    with pytest.raises(ValueError, match="format is nvfp4, wanted one of nf4, fp4"):
        mg.to_bitsandbytes(w)
