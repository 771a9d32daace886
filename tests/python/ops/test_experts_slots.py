"""Lists of slots at the owners of their experts, and their sums at home: the bits of one `experts`."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.ops.combine_slots import portable_combine_slots
from monograph.ops.experts_portable import portable_experts
from monograph.ops.experts_slots import portable_experts_slots, portable_experts_slots_backward
from monograph.ops.layout import make_layout, read_layout
from monograph.ops.slice_experts import slice_experts
from support.expert_layers import Case, E

ops = torch.ops.monograph
NEED = [True] * 6
FAMILIES = [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "nvfp4"), ("qwen3_moe", "fp8-block")]


def arguments(case, save=None):
    """Of `experts` without x, ids and weights."""
    own = case.leaves
    options = {"interleaved": False, "alpha": 1.0, "limit": 1.0, "transposed": False} | case.options
    names = ("interleaved", "alpha", "limit", "transposed")
    return [
        *(*case.first, own.get("bias1"), *case.second, own.get("bias2")),
        *(own["a1"], own["b1"], own["a2"], own["b2"], 0.5, 1.5, int(options["activation"])),
        *(options[name] for name in names),
    ]


def of_owner(given, first, count):
    """The same arguments for some of the experts."""
    cut = list(given)
    for at in (0, 4):
        values, scales, part = slice_experts(
            *given[at : at + 2], read_layout("test", given[at + 2]), first, count
        )
        numbers = (part.format, part.block, part.shape, part.origin, part.grid_rows)
        cut[at : at + 3] = [values.clone(), [s.clone() for s in scales], make_layout(*numbers)]
        bias = given[at + 3]
        cut[at + 3] = None if bias is None else bias[first : first + count].contiguous()
    for at in (8, 10):
        a, b = given[at : at + 2]
        cut[at] = a.reshape(E, -1, a.shape[1])[first : first + count].flatten(0, 1)
        cut[at + 1] = b.reshape(b.shape[0], -1, E)[..., first : first + count].flatten(1)
    return cut


def in_one(case, given):
    need = list(NEED)
    y, pre = ops.experts(case.leaves["x"], case.ids, case.leaves["weights"], *given, True)
    return y, *ops.experts_backward(
        case.dy, pre, case.leaves["x"], case.ids, case.leaves["weights"], *given, need
    )


def by_owners(case, given, owners, slots=ops.experts_slots, backward=ops.experts_slots_backward):
    x, weights, ids = case.leaves["x"], case.leaves["weights"], case.ids.reshape(-1)
    places = torch.full(ids.shape, -1)
    dweights = torch.zeros(ids.shape)
    d, dx, factors, arrived = [], [], [], 0
    for owner in range(owners):
        first, last = owner * E // owners, (owner + 1) * E // owners
        mine = ((ids >= first) & (ids < last)).nonzero()[:, 0]
        cut = of_owner(given, first, last - first)
        rows, own = mine // case.ids.shape[1], ids[mine] - first
        d.append(slots(x, rows, own, *cut))
        found = backward(case.dy, x, rows, own, weights.reshape(-1)[mine].contiguous(), *cut, NEED)
        places[mine] = arrived + torch.arange(len(mine))
        arrived += len(mine)
        dx.append(found[0])
        dweights[mine] = found[1]
        factors.append(found[2:])
    places = places.reshape(case.ids.shape)
    y = ops.combine_slots(torch.cat(d), places, weights)
    merged = []
    for kind, parts in enumerate(zip(*factors, strict=True)):
        if kind in (3, 5):  # column j E + e
            each = [
                p.reshape(p.shape[0], -1, (o + 1) * E // owners - o * E // owners)
                for o, p in enumerate(parts)
            ]
            merged.append(torch.cat(each, 2).flatten(1))
        else:
            merged.append(torch.cat(parts))
    return y, ops.combine_slots(torch.cat(dx), places, None), dweights.reshape(case.ids.shape), *merged


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("family", "format"), FAMILIES)
def test_owners_give_the_bits_of_one_call(family, format, dtype):
    """2 x INNER x H of 8 experts are not a multiple of 16,384 elements: the cut has an origin."""
    case = Case(family, format, dtype, tokens=37, outside=True)
    given = arguments(case)
    want = in_one(case, given)
    for owners in (1, 2, 3, 8):
        for place, (one, other) in enumerate(zip(by_owners(case, given, owners), want, strict=True)):
            assert torch.equal(one, other), (owners, place)


def test_the_stack_is_cut_inside_a_group():
    case = Case("qwen3_moe", "nf4", torch.float32)
    layout = read_layout("test", case.first[2])
    _, _, part = slice_experts(*case.first[:2], layout, 3, 2)
    assert part.origin > 0
    assert part.shape == (2, *layout.shape[1:])


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 64, 64), (7, 48, 96), (3, 130, 66)])
def test_experts_of_a_stack_have_its_values(shape, double_quant):
    weight = torch.randn(shape)
    for name in ("nf4", "mxfp4", "nvfp4", "fp8-block", "mxfp8"):
        if name in ("mxfp4", "mxfp8", "nvfp4") and shape[2] % 32:
            continue
        packed = mg.quantize(weight, name, **({"double_quant": double_quant} if name == "nf4" else {}))
        whole = packed.dequantize(torch.float32)
        for first in range(shape[0]):
            for count in range(1, shape[0] + 1 - first):
                part = packed.slice_experts(first, count)
                assert torch.equal(part.dequantize(torch.float32), whole[first : first + count])
    with pytest.raises(ValueError, match="experts 2 to 9 are wanted, the stack has"):
        packed.slice_experts(2, 7)
    with pytest.raises(ValueError, match="2 dimensions, wanted 3"):
        mg.quantize(weight[0], "nf4").slice_experts(0, 1)


@pytest.mark.parametrize(("family", "format"), FAMILIES[:2])
def test_the_portable_implementation_gives_the_same(family, format, monkeypatch):
    """In float32, whose products sum in another order: within rounding."""
    case = Case(family, format, torch.float32)
    given = arguments(case)
    portable = by_owners(case, given, 3, portable_experts_slots, portable_experts_slots_backward)
    for one, other in zip(portable, in_one(case, given), strict=True):
        assert (one - other).norm() <= 2**-18 * other.norm()


def test_the_portable_layer_reads_a_stack_with_an_origin():
    case = Case("qwen3_moe", "nf4", torch.float32)
    cut = of_owner(arguments(case), 3, 3)
    ids = case.ids - 3
    got, _ = portable_experts(case.leaves["x"], ids, case.leaves["weights"], *cut, False)
    want, _ = ops.experts(case.leaves["x"], ids, case.leaves["weights"], *cut, False)
    assert (got - want).norm() <= 2**-18 * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_fp32_in_the_order_of_slots(dtype, weighted):
    torch.manual_seed(1)
    rows = torch.randn(40, 33).to(dtype)
    rows[5] = -0.0
    rows[6] = float("inf")
    rows[7] = float("nan")
    places = torch.randint(-1, 41, (29, 5))
    places[0], places[1, 0] = 5, 2**40
    places[2] = -1
    weights = torch.rand(29, 5) if weighted else None
    got = ops.combine_slots(rows, places, weights)
    for t in range(29):
        total = torch.zeros(33)
        for j in range(5):
            if 0 <= places[t, j] < 40:
                one = rows[places[t, j]].float()
                total = total + (one if weights is None else weights[t, j] * one)
        assert torch.equal(got[t].isnan(), total.isnan())
        assert torch.equal(
            got[t].nan_to_num().view(torch.uint8), total.to(dtype).nan_to_num().view(torch.uint8)
        )
    assert torch.equal(got.nan_to_num(), portable_combine_slots(rows, places, weights).nan_to_num())
    assert not got[0].signbit().any()
    assert ops.combine_slots(rows[:0], places, weights).abs().sum() == 0
    assert list(ops.combine_slots(rows, places[:0], weights if weights is None else weights[:0]).shape) == [
        0,
        33,
    ]


def test_what_is_outside_raises():
    case = Case("qwen3_moe", "nf4", torch.float32)
    given, x = arguments(case), case.leaves["x"]
    rows, ids, w = torch.tensor([0, 22]), torch.tensor([0, E - 1]), torch.rand(2)
    for slots in (ops.experts_slots, portable_experts_slots):
        for spoiled in ([0, 23], [-1, 0], [0, 2**40]):
            with pytest.raises((RuntimeError, ValueError), match="experts_slots: rows"):
                slots(x, torch.tensor(spoiled), ids, *given)
        for spoiled in ([0, E], [-1, 0], [0, 2**40]):
            with pytest.raises((RuntimeError, ValueError), match="experts_slots: ids"):
                slots(x, rows, torch.tensor(spoiled), *given)
    with pytest.raises(RuntimeError, match="experts_slots_backward: ids"):
        ops.experts_slots_backward(x, x, rows, ids + 1, w, *given, NEED)
    with pytest.raises(RuntimeError, match="weights has 1 entries, wanted 2 as ids"):
        ops.experts_slots_backward(x, x, rows, ids, w[:1], *given, NEED)


def test_no_slots():
    case = Case("gpt_oss", "mxfp4", torch.bfloat16)
    given, x, none = arguments(case), case.leaves["x"], torch.zeros(0, dtype=torch.long)
    assert list(ops.experts_slots(x, none, none, *given).shape) == [0, x.shape[1]]
    dx, dw, *rest = ops.experts_slots_backward(x, x, none, none, torch.zeros(0), *given, NEED)
    assert dx.shape[0] == dw.shape[0] == 0
    assert all(t.abs().sum() == 0 for t in rest)
    empty = ops.experts_slots(x[:0], none, none, *given)
    assert list(empty.shape) == [0, x.shape[1]]


def test_opcheck_and_flops():
    case = Case("gpt_oss", "mxfp4", torch.float32)
    given, x, w = arguments(case), case.leaves["x"], torch.rand(3)
    rows, ids = torch.tensor([3, 3, 9]), torch.tensor([1, 0, 5])
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    given = [t.detach() if isinstance(t, torch.Tensor) else t for t in given]
    opcheck(ops.experts_slots.default, (x, rows, ids, *given), test_utils=utils)
    opcheck(ops.experts_slots_backward.default, (x, x, rows, ids, w, *given, NEED), test_utils=utils)
    opcheck(ops.combine_slots.default, (x, torch.tensor([[1, 2], [0, -1]]), None), test_utils=utils)
    with FlopCounterMode(display=False) as slots:
        ops.experts_slots(x, rows, ids, *given)
    with FlopCounterMode(display=False) as one:
        ops.experts(x[:3], ids[:, None], w[:, None], *given, False)
    assert slots.get_total_flops() == one.get_total_flops() > 0


def test_a_gradient_through_a_list_of_slots_raises():
    case = Case("qwen3_moe", "nf4", torch.float32)
    x = case.leaves["x"].clone().requires_grad_()
    rows, ids = torch.tensor([0]), torch.tensor([0])
    with pytest.raises(RuntimeError, match="experts_slots"):
        ops.experts_slots(x, rows, ids, *arguments(case)).sum().backward()
    with pytest.raises(RuntimeError, match="combine_slots"):
        ops.combine_slots(x, torch.tensor([[0]]), None).sum().backward()
