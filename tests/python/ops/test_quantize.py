"""quantize against bitsandbytes' codes, the portable implementation, and its documented differences."""

import pytest
import torch

import monograph as mg
from monograph.ops.formats import ABSMAX_FORMATS, value_table
from monograph.ops.quantize import dynamic_map, portable_quantize
from support import bnb_reference as bnb

pytestmark = pytest.mark.per_isa  # run once for each MONOGRAPH_ISA


def same_as_bitsandbytes(weight, name, block):
    values, absmax = bnb.quantize(weight, block, name)
    ours = torch.ops.monograph.quantize(weight, ABSMAX_FORMATS[name].number, block, False, False)
    assert torch.equal(ours[0], values.reshape(-1)), (name, block, weight.shape)
    assert torch.equal(ours[1].view(torch.float32), absmax)


@pytest.mark.parametrize("name", ABSMAX_FORMATS)
@pytest.mark.parametrize("dtype", bnb.DTYPES)
def test_ten_million_random_values_get_bitsandbytes_codes(name, dtype):
    torch.manual_seed(3)
    same_as_bitsandbytes((torch.randn(1250, 1344) * 0.02).to(dtype), name, 64)  # 1.68 M, times six
    for block in bnb.BLOCKS:
        same_as_bitsandbytes(torch.randn(31, 131).to(dtype), name, block)  # partial last block


@pytest.mark.parametrize("name", ABSMAX_FORMATS)
def test_every_midpoint_and_its_neighbours_get_bitsandbytes_codes(name):
    ascending = value_table(ABSMAX_FORMATS[name], torch.device("cpu")).sort().values
    middle = (ascending[:-1] + ascending[1:]) / 2
    around = torch.cat([middle, middle.nextafter(torch.tensor(2.0)), middle.nextafter(torch.tensor(-2.0))])
    block = torch.cat([torch.ones(1), around, torch.zeros(18)])
    for scale in (1.0, 0.37, 3e-5, 1e-38, 2e30):
        same_as_bitsandbytes(block * scale, name, 64)


@pytest.mark.parametrize("name", ABSMAX_FORMATS)
def test_all_bf16_values_get_bitsandbytes_codes(name):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    same_as_bitsandbytes(every[every.isfinite()], name, 32)


def test_the_portable_implementation_gives_the_same_bits():
    torch.manual_seed(4)
    bad = torch.randn(100)
    bad[::7], bad[::11] = float("nan"), float("-inf")
    inputs = [torch.randn(n) for n in (0, 1, 31, 64, 65, 1000, 70000)] + [torch.zeros(130)]
    for fmt in ABSMAX_FORMATS.values():
        for block in (32, 64, 4096):
            for double in (False, True):
                for x in inputs:
                    got = torch.ops.monograph.quantize(x, fmt.number, block, double, False)
                    want = portable_quantize(x, fmt.number, block, double, False)
                    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (
                        fmt.name,
                        block,
                        x.shape,
                    )
                got = torch.ops.monograph.quantize(bad, fmt.number, block, double, True)
                want = portable_quantize(bad, fmt.number, block, double, True)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_double_quantised_scales_are_the_exact_nearest():
    """Nearest of 256 values by exact comparison; bitsandbytes bins to 16 bits first and may differ."""
    torch.manual_seed(5)
    weight = torch.randn(1024, 4096)
    w = mg.quantize(weight, double_quant=True)
    absmax = mg.quantize(weight).scales[0].reshape(-1).view(torch.float32)
    codes, groups, table, offset = (s.reshape(-1) for s in w.scales)
    groups, table, offset = (t.view(torch.float32) for t in (groups, table, offset))
    assert torch.equal(table, dynamic_map())
    assert offset.item() == absmax.double().mean().float().item()
    scaled = (absmax - offset) * (1 / groups).repeat_interleave(256)
    distance = (scaled.double()[:, None] - table.double()[None, :]).abs()
    assert torch.equal(codes.long(), distance.argmin(dim=1))
    (bnb_codes, _, _, _), _ = bnb.nested_scales(absmax)
    differing = (bnb_codes.reshape(-1) != codes).float().mean().item()
    assert differing < 0.01, f"{differing:.2%} of the codes differ from bitsandbytes' binned search"


def test_non_finite_input_is_an_error_that_names_the_position():
    weight = torch.randn(64, 64)
    weight[10, 3] = float("nan")
    with pytest.raises(RuntimeError, match="not finite at flat index 643"):
        mg.quantize(weight)
    with pytest.raises(RuntimeError, match="not finite at flat index 643"):
        portable_quantize(weight, 1, 64, False, False)
    with pytest.raises(ValueError, match="nonfinite is 'ignore'"):
        mg.quantize(weight, nonfinite="ignore")
    weight[10, 4] = float("inf")
    back = mg.quantize(weight, nonfinite="saturate").dequantize()
    assert back.isfinite().all()
    assert back[10, 3] == 0
    finite = torch.where(weight.isfinite(), weight, 0.0)
    assert back[10, 4] == finite[10].abs().max()


@pytest.mark.parametrize("name", ABSMAX_FORMATS)
def test_round_trip_error_of_normal_weights(name):
    """Mean absolute error over standard normal values, block 64: 0.0728 for nf4, 0.0963 for fp4 +-1 %."""
    torch.manual_seed(6)
    weight = torch.randn(2048, 1024)
    error = (mg.quantize(weight, name).dequantize() - weight).abs().mean().item()
    assert error == pytest.approx({"nf4": 0.0728, "fp4": 0.0963}[name], rel=0.01)
