"""linear_many: every adapter has, forward and backward, the bits of `linear` called for it alone."""

from dataclasses import dataclass

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.ops.layout import plain_layout
from monograph.ops.linear import linear, plain_linear
from monograph.ops.linear_many import linear_many, portable_linear_many, portable_linear_many_dx
from monograph.ops.linear_scaled import linear_scaled
from monograph.ops.low_rank_many import (
    low_rank_many,
    low_rank_many_dx,
    portable_low_rank_many,
    portable_low_rank_many_dx,
)
from support.ggml_weights import random_weight

pytestmark = pytest.mark.per_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Adapter:
    """kind: plain, dropout, gain (DoRA) or none, a module that is no target of it."""

    rows: int
    rank: int
    kind: str = "plain"


MIXTURE = [Adapter(5, 8), Adapter(4, 0, "none"), Adapter(0, 12, "dropout"), Adapter(17, 33, "gain")]
MIXTURE += [Adapter(1, 1), Adapter(33, 16, "dropout")]


def packed_weight(rows, cols, name="nf4", dtype=torch.float32):
    weight = torch.randn(rows, cols)
    if name == "q4_k":
        packed, _ = random_weight(name, rows, cols, 1)
        return packed.values, list(packed.scales), packed.layout
    if name == "plain":
        return weight.to(dtype), [], plain_layout((rows, cols))
    packed = mg.quantize(weight, name.removesuffix("-double"), double_quant=name.endswith("double"))
    return packed.values, list(packed.scales), packed.layout


class Case:
    """Tensors of all adapters, and what one and all of them compute."""

    def __init__(self, adapters, dtype=torch.float32, rows=72, cols=96, name="nf4-double", bias=True):
        torch.manual_seed(0)
        self.adapters, self.rows, self.cols = adapters, rows, cols
        self.packed = packed_weight(rows, cols, name, dtype)
        self.starts = torch.tensor([0, *(one.rows for one in adapters)]).cumsum(0)
        count = int(self.starts[-1])
        self.x, self.dy = torch.randn(count, cols).to(dtype), torch.randn(count, rows).to(dtype)
        self.dropped = torch.where(torch.rand(count, cols) < 0.3, 0, self.x).to(dtype)
        self.a = [torch.randn(one.rank, cols).to(dtype) for one in adapters]
        self.b = [torch.randn(rows, one.rank).to(dtype) for one in adapters]
        self.gain = [1 + 0.1 * torch.randn(rows) for _ in adapters]
        self.bias = torch.randn(rows).to(dtype) if bias else None

    def own(self, i):
        return slice(int(self.starts[i]), int(self.starts[i + 1]))

    def leaves(self):
        """Those of all adapters, by name."""
        found = {"x": self.x, "dropped": self.dropped}
        for i in range(len(self.adapters)):
            found |= {f"a{i}": self.a[i], f"b{i}": self.b[i], f"gain{i}": self.gain[i]}
        return {name: t.detach().clone().requires_grad_() for name, t in found.items()}

    def many(self, leaves, starts=None):
        starts = self.starts if starts is None else starts
        count, width = len(self.adapters), max(one.rank for one in self.adapters)
        a, b = ([leaves[f"{which}{i}"] for i in range(count)] for which in "ab")
        none, no_gain = self.x.new_empty(0, self.cols), torch.empty(0)
        kinds = [one.kind for one in self.adapters]
        fused = [m if kind in ("plain", "gain") else none for m, kind in zip(a, kinds, strict=True)]
        with torch.no_grad():
            u = low_rank_many(leaves["x"], fused, starts, width)
        if "dropout" in kinds:
            own = [m if kind == "dropout" else none for m, kind in zip(a, kinds, strict=True)]
            u = u + low_rank_many(leaves["dropped"], own, starts, width)
        gain = [leaves[f"gain{i}"] if kind == "gain" else no_gain for i, kind in enumerate(kinds)]
        bias = [] if self.bias is None else [self.bias] * count
        return linear_many(
            leaves["x"], *self.packed, starts, u, b, fused, bias, gain if "gain" in kinds else []
        )

    def alone(self, i):
        """Output and gradients of one adapter on its rows, as PEFT's layer of ours computes them today."""
        kind, rows = self.adapters[i].kind, self.own(i)
        given = {"x": self.x[rows], "dropped": self.dropped[rows], "a": self.a[i], "b": self.b[i]}
        given["gain"] = self.gain[i]
        leaf = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
        x, a, b = leaf["x"], leaf["a"], leaf["b"]
        if kind == "none":
            y = linear(x, *self.packed, self.bias)
        elif kind == "dropout":
            y = linear(x, *self.packed, self.bias, plain_linear(leaf["dropped"], a), b)
        else:
            u = plain_linear(x, a).detach()
            if kind == "plain":
                y = linear(x, *self.packed, self.bias, u, b, a)
            else:
                y = linear_scaled(x, *self.packed, leaf["gain"], u, b, a)
                y = y if self.bias is None else y + self.bias
        found = torch.autograd.grad(y, list(leaf.values()), self.dy[rows], allow_unused=True)
        return y.detach(), dict(zip(leaf, found, strict=True))

    def run(self):
        leaves = self.leaves()
        y = self.many(leaves)
        found = torch.autograd.grad(y, list(leaves.values()), self.dy, allow_unused=True)
        return y.detach(), dict(zip(leaves, found, strict=True))


def same_bits(got, want):
    integers = {4: torch.int32, 2: torch.int16}[got.element_size()]
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    return torch.equal(got.contiguous().view(integers), want.contiguous().view(integers))


def check(case, of=None):
    y, gradients = case.run()
    for i, adapter in enumerate(case.adapters):
        if adapter.rows == 0 or (of is not None and i not in of):
            continue
        want, own = case.alone(i)
        assert same_bits(y[case.own(i)], want), f"y of adapter {i}"
        for name, gradient in own.items():
            if gradient is None:
                continue
            found = gradients[name if name in ("x", "dropped") else f"{name}{i}"]
            found = found[case.own(i)] if name in ("x", "dropped") else found
            assert same_bits(found, gradient), f"d{name} of adapter {i}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_mixture_of_all_kinds(dtype, bias):
    check(Case(MIXTURE, dtype, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [(1, 12, 33), (64, 96, 128), (300, 200, 100), (8, 8, 8)], ids=str)
def test_ranks_whose_sums_cross_256_and_512(dtype, ranks):
    rows = (3, 40, 18)
    check(Case([Adapter(m, rank) for m, rank in zip(rows, ranks, strict=True)], dtype, rows=136, cols=160))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("rows", [1, 16, 17, 97])
def test_one_adapter_and_sixteen(dtype, count, rows):
    """One row each is where other kernels would be chosen for all of them than for one."""
    check(Case([Adapter(rows, 4 + i) for i in range(count)], dtype, rows=80, cols=544))


@pytest.mark.parametrize(
    "name",
    ["nf4-double", "fp4", "mxfp4", "mxfp8", "nvfp4", "fp8-block", "int4", "int8", "q4_k", "plain"],
)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_formats(name, dtype):
    adapters = [Adapter(7, 8), Adapter(40, 12), Adapter(1, 3, "dropout"), Adapter(70, 16)]
    check(Case(adapters, dtype, rows=128, cols=256, name=name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["a", "b", "x", "gain"])
def test_what_is_not_finite_stays_with_its_adapter(dtype, value, where):
    case = Case([Adapter(9, 8), Adapter(20, 16, "gain"), Adapter(3, 4), Adapter(30, 8, "dropout")], dtype)
    spoiled = {"a": case.a[1], "b": case.b[1], "gain": case.gain[1], "x": case.x[case.own(1)]}[where]
    spoiled.view(-1)[::7] = value
    y, _ = case.run()
    assert not y[case.own(1)].isfinite().all()
    assert y[case.own(0)].isfinite().all()
    assert y[case.own(2)].isfinite().all()
    check(case, of=(0, 2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_portable_form_calls_linear_for_each_and_so_has_its_bits(dtype):
    case = Case(MIXTURE, dtype)
    none, count = torch.empty(0), len(MIXTURE)
    u = low_rank_many(case.x, case.a, case.starts, 40)
    assert same_bits(u, portable_low_rank_many(case.x, case.a, case.starts, 40))
    gained = [one.kind == "gain" for one in MIXTURE]
    gain = [case.gain[i] if gained[i] else none for i in range(count)]
    bias = [case.bias.new_empty(0) if gained[i] else case.bias for i in range(count)]
    given = (case.x, *case.packed, case.starts, u, case.b, case.a, bias, gain)
    assert same_bits(torch.ops.monograph.linear_many(*given), portable_linear_many(*given))
    du = low_rank_many_dx(case.dy, case.b, case.starts, 33)
    assert same_bits(du, portable_low_rank_many_dx(case.dy, case.b, case.starts, 33))
    for a in (case.a, []):
        given = (case.dy, *case.packed, case.starts, du, a)
        assert same_bits(torch.ops.monograph.linear_many_dx(*given), portable_linear_many_dx(*given))


def test_what_no_adapter_fills_of_u_changes_nothing():
    case = Case([Adapter(3, 4), Adapter(2, 0), Adapter(4, 2)])
    u = low_rank_many(case.x, case.a, case.starts, 5)
    filled = torch.zeros(9, 5, dtype=torch.bool)
    filled[:3, :4], filled[5:, :2] = True, True
    assert torch.equal(filled, ~((u == 0) & u.signbit()))


def test_threads_change_no_bit():
    case = Case([Adapter(70, 8), Adapter(50, 33), Adapter(3, 4, "gain")], torch.bfloat16, rows=300, cols=200)
    want, gradients = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        got, again = case.run()
    finally:
        torch.set_num_threads(threads)
    assert same_bits(got, want)
    assert all(same_bits(again[n], g) for n, g in gradients.items() if g is not None)


def test_gradients_against_float64():
    case = Case(MIXTURE, torch.float32)
    y, gradients = case.run()
    weight = torch.ops.monograph.dequantize(*case.packed, torch.float32).double()
    for i, adapter in enumerate(case.adapters):
        rows = case.own(i)
        leaves = {"a": case.a[i], "b": case.b[i], "gain": case.gain[i], "x": case.x[rows]}
        leaves["dropped"] = case.dropped[rows]
        wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
        low = wide["dropped" if adapter.kind == "dropout" else "x"] @ wide["a"].t() @ wide["b"].t()
        exact = wide["x"] @ weight.t() + (0 if adapter.kind == "none" else low)
        exact = (exact * wide["gain"] if adapter.kind == "gain" else exact) + case.bias.double()
        want = torch.autograd.grad(exact, list(wide.values()), case.dy[rows].double(), allow_unused=True)
        assert (y[rows].double() - exact).norm() <= 2**-17 * exact.norm()
        for name, gradient in zip(wide, want, strict=True):
            if gradient is None:
                continue
            found = gradients[name if name in ("x", "dropped") else f"{name}{i}"]
            found = found[rows] if name in ("x", "dropped") else found
            assert (found.double() - gradient).norm() <= 2**-17 * gradient.norm(), (i, name)


def test_an_adapter_without_rows_has_gradients_of_zero():
    case = Case([Adapter(4, 8), Adapter(0, 4, "gain")])
    _, gradients = case.run()
    for name in ("a1", "b1", "gain1"):
        assert torch.equal(gradients[name], torch.zeros_like(gradients[name]))


def test_a_trained_bias_of_each_adapter():
    case = Case([Adapter(5, 4), Adapter(9, 8)], torch.bfloat16)
    bias = [torch.randn(72).bfloat16().requires_grad_() for _ in range(2)]
    u = low_rank_many(case.x, case.a, case.starts, 8)
    y = linear_many(case.x, *case.packed, case.starts, u, case.b, case.a, bias)
    found = torch.autograd.grad(y, bias, case.dy)
    for i, own in enumerate(bias):
        rows = case.own(i)
        want = linear(case.x[rows], *case.packed, own, plain_linear(case.x[rows], case.a[i]), case.b[i])
        assert same_bits(y[rows], want)
        assert same_bits(found[i], torch.autograd.grad(want, own, case.dy[rows])[0])


SPLITS = [
    [5, 7, 3, 9],
    [0, 11, 4, 2],
    [31, 0, 0, 5],
    [0, 0, 0, 17],
    [1, 1, 1, 1],
    [64, 3, 0, 0],
    [2, 0, 40, 13],
]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ranges_are_data_in_one_graph(backend):
    """Eight batches with other lengths and other ranges: one graph, eager's bits."""
    case = Case([Adapter(6, 8), Adapter(6, 16, "dropout"), Adapter(6, 4, "gain"), Adapter(6, 3)])
    leaves = case.leaves()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def step(x, dropped, starts):
        return case.many({**leaves, "x": x, "dropped": dropped}, starts).square().sum()

    names = [name for name in leaves if name[0] in "ab"] + ["gain2"]
    wanted = [leaves[name] for name in names]
    compiled = torch.compile(step, backend=count, fullgraph=True)
    for split in [[6, 6, 6, 6], *SPLITS] if backend == "aot_eager" else SPLITS[:3]:
        starts = torch.tensor([0, *split]).cumsum(0)
        x, dropped = (torch.randn(sum(split), case.cols).requires_grad_() for _ in range(2))
        for t in (x, dropped):
            torch._dynamo.mark_dynamic(t, 0)
        one, other = (
            torch.autograd.grad(function(x, dropped, starts), [x, dropped, *wanted])
            for function in (compiled, step)
        )
        for name, got, want in zip(["x", "dropped", *names], one, other, strict=True):
            assert same_bits(got, want), (split, name)
    assert len(graphs) == 1


def test_opcheck():
    case = Case([Adapter(3, 4), Adapter(4, 2, "dropout"), Adapter(2, 3, "gain")], rows=24, cols=64)
    leaves = case.leaves()
    none = case.x.new_empty(0, 64)
    u = low_rank_many(case.x, case.a, case.starts, 4).requires_grad_()
    a, b = [leaves["a0"], none, leaves["a2"]], [leaves[f"b{i}"] for i in range(3)]
    bias, gain = [case.bias, case.bias, torch.empty(0)], [torch.empty(0), torch.empty(0), leaves["gain2"]]
    ops = torch.ops.monograph
    opcheck(ops.linear_many, (leaves["x"], *case.packed, case.starts, u, b, a, bias, gain))
    opcheck(ops.linear_many_dx, (case.dy, *case.packed, case.starts, u.detach(), [t.detach() for t in a]))
    opcheck(ops.low_rank_many, (leaves["x"], [leaves["a0"], none, leaves["a2"]], case.starts, 5))
    opcheck(ops.low_rank_many_dx, (case.dy, case.b, case.starts, 4))
    opcheck(ops.gram_many, (case.dy, case.x, case.starts, [24, 0, 3], [64, 5, 1], torch.bfloat16))
    opcheck(ops.gain_backward_many, (case.dy, case.dy, [t.detach() for t in gain], case.starts))
    opcheck(ops.sum_rows_many, (case.dy, case.starts, [True, False, True]))


def test_flops_and_autocast():
    case = Case([Adapter(4, 8), Adapter(6, 16)], bias=False)
    with FlopCounterMode(display=False) as counter:
        case.many(case.leaves())
    # As if every row had the widest factor: what is whose is data.
    assert counter.get_total_flops() == 2 * 10 * 72 * (96 + 16) + 2 * 10 * 16 * 96
    with torch.amp.autocast("cpu", torch.bfloat16):
        y = case.many(case.leaves())
    narrow = {name: t if name.startswith("gain") else t.bfloat16() for name, t in case.leaves().items()}
    assert same_bits(y, case.many(narrow))


def test_second_derivatives_raise():
    case = Case([Adapter(4, 8), Adapter(6, 16, "dropout"), Adapter(3, 2, "gain")])
    leaves = case.leaves()
    wanted = [t for name, t in leaves.items() if name not in ("gain0", "gain1")]
    first = torch.autograd.grad(
        case.many(leaves).square().sum(), wanted, create_graph=True, allow_unused=True
    )
    with pytest.raises(RuntimeError, match=r"(_many|_many_dx) is a gradient and cannot be differentiated"):
        sum(g.square().sum() for g in first if g is not None).backward()


@pytest.mark.parametrize(
    "numbers", [[0, 3, 2, 9], [1, 3, 5, 9], [0, 3, 5, 8], [0, 3, 5, 10], [-1, 3, 5, 9]], ids=str
)
def test_starts_that_are_no_ranges(numbers):
    case = Case([Adapter(3, 4), Adapter(2, 4), Adapter(4, 4)])
    with pytest.raises(
        (RuntimeError, ValueError), match=r"starts is \[.*wanted ascending numbers from 0 to 9"
    ):
        case.many(case.leaves(), torch.tensor(numbers))


def test_misuse():
    case = Case([Adapter(3, 4), Adapter(6, 2)])
    u = low_rank_many(case.x, case.a, case.starts, 4)

    def refused(text, **changes):
        given = {"starts": case.starts, "u": u, "b": case.b, "a": case.a, "bias": (), "gain": ()} | changes
        with pytest.raises((RuntimeError, ValueError), match=text):
            linear_many(case.x, *case.packed, **given)

    refused(r"starts is int32 \[3\], wanted int64", starts=case.starts.int())
    refused("starts has 4 entries, wanted 3 for 2 adapters", starts=torch.tensor([0, 3, 6, 9]))
    refused("a has 1 entries, wanted 0 or 2", a=case.a[:1])
    refused(r"u has 3 columns, wanted 4 or more for b\[0\]", u=u[:, :3])
    refused(r"a\[0\] has 3 rows, wanted 4", a=[case.a[0][:3], case.a[1]])
    refused(r"b\[1\] is bfloat16, wanted float32 as the others", b=[case.b[0], case.b[1].bfloat16()])
    refused(r"gain\[0\] is given without a\[0\]", a=(), gain=[case.gain[0], torch.empty(0)])
    refused(r"gain\[1\] is bfloat16, wanted float32", gain=[torch.empty(0), case.gain[1].bfloat16()])
    weight = torch.randn(72, 96, requires_grad=True)
    with pytest.raises(ValueError, match="the weight requires a gradient"):
        linear_many(case.x, weight, [], plain_layout((72, 96)), case.starts, u, case.b)


def test_the_portable_form_names_a_missing_u():
    case = Case([Adapter(3, 4)])
    given = (case.x, *case.packed, case.starts)
    with pytest.raises(ValueError, match="linear_many: u is None"):
        portable_linear_many(*given, None, case.b, case.a, [], [])
    with pytest.raises(ValueError, match="linear_many_dx: du is None"):
        portable_linear_many_dx(case.dy, *case.packed, case.starts, None, case.a)


def test_leading_dimensions_and_strides():
    case = Case([Adapter(3, 4), Adapter(5, 2)])
    want, _ = case.run()
    leaves = case.leaves()
    leaves["x"] = torch.cat([case.x, case.x], 1)[None, :, : case.cols]
    assert same_bits(case.many(leaves)[0], want)
    leaves["x"] = case.x.reshape(2, 4, -1)
    assert same_bits(case.many(leaves).reshape(8, -1), want)
