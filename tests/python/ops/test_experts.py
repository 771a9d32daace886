"""experts and its gradients: transformers' modelling code in float64, skipped slots, bits, one graph."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.ops.experts import Activation, portable_experts
from monograph.ops.experts_portable import sort_slots
from monograph.ops.layout import make_layout, plain_layout
from support.expert_layers import FAMILIES, INNER, RANK, Case, E, H, K, run

# Roundings between an input and an output: pre, h, d (or dpre, u, du) and the result itself.
ROUND = {torch.bfloat16: 4 * 2**-8, torch.float32: 2**-19}
FORMATS = ["plain", "nf4", "mxfp4", "fp8-block", "nvfp4"]
ops = torch.ops.monograph


def close(got, want, dtype, corners=1):
    for name, one in got.items():
        assert one.isfinite().all(), name
        distance = (one.double() - want[name].double()).norm() / want[name].double().norm()
        assert distance <= corners * ROUND[dtype], (name, float(distance))


def wide(leaves):
    return {name: t.double() for name, t in leaves.items()}


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", list(ROUND), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_of_transformers_modules(family, dtype):
    """pre rounded to bfloat16 lies beyond a corner of the clamp at 4 in one element of a thousand, whose
    gradient is then missing: a distance of sqrt(0.001)."""
    case = Case(family, "plain", dtype)
    got = run(case.operator, case.leaves, case.dy)
    want = run(
        lambda own: case.reference(own, (case.dense1, case.dense2)), wide(case.leaves), case.dy.double()
    )
    close(got, want, dtype, corners=3 if (family, dtype) == ("deepseek_v4", torch.bfloat16) else 1)


@pytest.mark.per_isa
@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_weights(family, format):
    case = Case(family, format, torch.float32, outside=True)
    got = run(case.operator, case.leaves, case.dy)
    want = run(
        lambda own: case.reference(own, (case.dense1, case.dense2)), wide(case.leaves), case.dy.double()
    )
    close(got, want, torch.float32)


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", list(ROUND), ids=str)
@pytest.mark.parametrize("format", FORMATS[1:])
def test_lora_gradients_have_the_bits_of_the_dequantised_weight(format, dtype):
    case = Case("qwen3_moe", format, dtype, outside=True)
    dense = {
        name: (w.to(dtype), [], plain_layout(w.shape))
        for name, w in (("first", case.dense1), ("second", case.dense2))
    }
    packed = run(case.operator, case.leaves, case.dy)
    plain = run(lambda own: case.operator(own, **dense), case.leaves, case.dy)
    for name, one in packed.items():
        assert torch.equal(one, plain[name]), name


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", list(ROUND), ids=str)
@pytest.mark.parametrize(
    ("family", "format"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "nf4"), ("gpt_oss", "plain")]
)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(family, format, dtype):
    case = Case(family, format, dtype, tokens=37, outside=True)
    whole = run(case.operator, case.leaves, case.dy)
    for rows in ([0], [36], [5, 6], [30, 2, 2, 17], list(range(36, -1, -1))):
        leaves = case.leaves | {name: case.leaves[name][rows] for name in ("x", "weights")}
        part = run(lambda own, rows=rows: case.operator(own, ids=case.ids[rows]), leaves, case.dy[rows])
        for name in ("y", "x", "weights"):
            assert torch.equal(part[name], whole[name][rows]), (name, rows)


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", list(ROUND), ids=str)
def test_the_number_of_threads_changes_no_bit(dtype):
    case = Case("gpt_oss", "mxfp4", dtype, tokens=150, outside=True)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(run(case.operator, case.leaves, case.dy))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for name, one in results[0].items():
            assert torch.equal(one, other[name]), name


@pytest.mark.per_isa
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_gradients_of_plain_weights(family):
    case = Case(family, "plain", torch.float32, outside=True)
    leaves = {"w1": case.first[0], "w2": case.second[0]}

    def operator(own):
        first, second = ((own[name], [], plain_layout(own[name].shape)) for name in ("w1", "w2"))
        return case.operator(case.leaves, first=first, second=second)

    def reference(own):
        dense = [own[name].transpose(1, 2) if case.layer.transposed else own[name] for name in ("w1", "w2")]
        return case.reference(wide(case.leaves), tuple(dense))

    got, want = run(operator, leaves, case.dy), run(reference, wide(leaves), case.dy.double())
    close(got, want, torch.float32)
    assert [got[name].shape for name in leaves] == [t.shape for t in leaves.values()]


def arguments(case, save=True, leaves=None):
    own = leaves or case.leaves
    options = {"interleaved": False, "alpha": 1.0, "limit": 1.0, "transposed": False} | case.options
    names = ("activation", "interleaved", "alpha", "limit", "transposed")
    return [
        *(own["x"], case.ids, own["weights"]),
        *(*case.first, own.get("bias1"), *case.second, own.get("bias2")),
        *(own["a1"], own["b1"], own["a2"], own["b2"], 0.5, 1.5),
        *(int(options[name]) if name == "activation" else options[name] for name in names),
        *([] if save is None else [save]),
    ]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_pre_is_sorted_and_what_backward_computes_again(family):
    case = Case(family, "nf4", torch.float32, outside=True)
    y, pre = ops.experts(*arguments(case))
    again, empty = ops.experts(*arguments(case, save=False))
    assert torch.equal(y, again)
    assert list(empty.shape) == [0, 2 * INNER]
    nowhere = int(((case.ids < 0) | (case.ids >= E)).sum())
    assert nowhere > 0
    assert pre.shape[0] == case.ids.numel()
    assert torch.all(pre[-nowhere:] == 0)
    assert torch.all(pre[:-nowhere].abs().sum(1) > 0)
    # Expert by expert, in the order of slots within one.
    order = torch.argsort(torch.where((case.ids < 0) | (case.ids >= E), E, case.ids).flatten(), stable=True)
    slot, expert = int(order[7]), int(case.ids.flatten()[order[7]])
    low = 0.5 * case.leaves["b1"].reshape(2 * INNER, RANK, E)[:, :, expert].double()
    row = case.leaves["x"][slot // K].double()
    want = case.dense1[expert] @ row + low @ (case.leaves["a1"].reshape(E, RANK, H)[expert].double() @ row)
    if "bias1" in case.leaves:
        want = want + case.leaves["bias1"][expert].double()
    assert torch.allclose(pre[7].double(), want, atol=1e-4)
    need = [True] * 6
    one = ops.experts_backward(case.dy, pre, *arguments(case, save=None), need)
    other = ops.experts_backward(case.dy, empty, *arguments(case, save=None), need)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_is_not_needed_is_empty():
    case = Case("gpt_oss", "mxfp4", torch.float32)
    _, pre = ops.experts(*arguments(case))
    all_of_it = ops.experts_backward(case.dy, pre, *arguments(case, save=None), [True] * 6)
    for i, outputs in enumerate(((0,), (1,), (2,), (3,), (4, 5), (6, 7))):
        some = ops.experts_backward(case.dy, pre, *arguments(case, save=None), [j == i for j in range(6)])
        assert [n for n, t in enumerate(some) if t.numel()] == list(outputs)
        assert all(torch.equal(some[n], all_of_it[n]) for n in outputs)


def test_experts_cut_over_ranks_add_up():
    """Expert parallelism as it will be: each rank has some experts, and the others' slots are outside."""
    case = Case("gpt_oss", "plain", torch.float32)
    whole = run(case.operator, case.leaves, case.dy)
    for ranks in (2, 4, 8):
        each, parts = E // ranks, []
        for rank in range(ranks):
            own = slice(rank * each, (rank + 1) * each)
            leaves = dict(case.leaves)
            for name in ("bias1", "bias2"):
                leaves[name] = leaves[name][own]
            for name in ("a1", "a2"):
                leaves[name] = leaves[name].reshape(E, RANK, -1)[own].flatten(0, 1)
            for name in ("b1", "b2"):
                leaves[name] = leaves[name].reshape(-1, RANK, E)[:, :, own].flatten(1)
            stacks = [
                (w[0][own].contiguous(), [], [0, 0, each, *w[2][3:]]) for w in (case.first, case.second)
            ]
            part = Case("gpt_oss", "plain", torch.float32)
            part.ids = case.ids - rank * each
            parts.append(
                run(
                    lambda o, part=part, s=stacks: part.operator(o, first=s[0], second=s[1]),
                    leaves,
                    case.dy,
                )
            )
        for name in ("y", "x", "weights"):
            assert torch.allclose(sum(p[name] for p in parts), whole[name], atol=1e-4), (ranks, name)
        for name in ("bias1", "a1", "bias2", "a2"):
            assert torch.allclose(torch.cat([p[name] for p in parts]), whole[name], atol=1e-4), name
        for name in ("b1", "b2"):
            own = [p[name].reshape(-1, RANK, each) for p in parts]
            assert torch.allclose(torch.cat(own, 2).flatten(1), whole[name], atol=1e-4), name


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (3, 0)])
def test_no_tokens_and_no_routes(tokens, k):
    case = Case("gpt_oss", "mxfp4", torch.float32, tokens=max(tokens, 3))
    case.ids, case.dy = case.ids[:tokens, :k], case.dy[:tokens]
    case.leaves |= {"x": case.leaves["x"][:tokens], "weights": case.leaves["weights"][:tokens, :k]}
    got = run(case.operator, case.leaves, case.dy)
    assert all(torch.all(t == 0) for t in got.values())
    assert got["y"].shape == (tokens, H)


@pytest.mark.parametrize("grids", ["one", "each expert", "gate and up"])
@pytest.mark.parametrize("format", ["nf4", "nvfp4", "fp8-block"])
def test_experts_that_were_quantised_one_by_one(format, grids):
    case = Case("qwen3_moe", "plain", torch.float32)
    rows = {"one": 0, "each expert": 2 * INNER, "gate and up": INNER}[grids]
    weight = case.dense1.float()
    parts = [mg.quantize(p, format) for p in (weight.reshape(-1, rows, H) if rows else [weight])]
    values = torch.cat([p.values.flatten() for p in parts])
    scales = [torch.cat([s.flatten() for s in own]) for own in zip(*(p.scales for p in parts), strict=True)]
    first = (values, scales, make_layout(parts[0].format.number, parts[0].block_size, weight.shape, 0, rows))
    dense = torch.cat([p.dequantize().reshape(-1, H) for p in parts]).reshape(weight.shape)
    got = run(lambda own: case.operator(own, first=first), case.leaves, case.dy)
    plain = (dense, [], plain_layout(dense.shape))
    want = run(lambda own: case.operator(own, first=plain), case.leaves, case.dy)
    for name, one in got.items():
        assert torch.equal(one, want[name]), name


@pytest.mark.per_isa
def test_portable():
    """The same call by the kernel of the device and in aten operations."""
    for family, format in (("qwen3_moe", "nf4"), ("gpt_oss", "plain"), ("nemotron_h", "mxfp4")):
        case = Case(family, format, torch.bfloat16, outside=True)
        ours, other = ops.experts(*arguments(case)), portable_experts(*arguments(case))
        for a, b in zip(ours, other, strict=True):
            assert (a.double() - b.double()).norm() <= 2 * ROUND[torch.bfloat16] * b.double().norm()


def test_portable_reads_no_routes():
    """Fakes have no data: what depended on it would raise."""
    case = Case("gpt_oss", "nf4", torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call = [
            mode.from_tensor(a)
            if isinstance(a, torch.Tensor)
            else [mode.from_tensor(t) for t in a]
            if isinstance(a, list) and a and isinstance(a[0], torch.Tensor)
            else a
            for a in arguments(case)
        ]
        y, pre = portable_experts(*call)
    assert list(y.shape) == list(case.leaves["x"].shape)
    assert list(pre.shape) == [case.ids.numel(), 2 * INNER]


@pytest.mark.parametrize("slots", [1, 5, 64])
def test_every_slot_is_in_one_block(slots):
    for ids in (
        torch.zeros(slots),
        torch.randint(-2, 9, (slots,)),
        torch.full((slots,), 7),
        torch.full((slots,), 8),
    ):
        ids = ids.long()
        blocks = sort_slots(ids, 8)
        taken = blocks.order[blocks.rows[blocks.inside]]
        inside = torch.nonzero((ids >= 0) & (ids < 8)).flatten()
        assert torch.equal(torch.sort(taken).values, inside)
        expert = blocks.experts[:, None].expand_as(blocks.rows)[blocks.inside]
        assert torch.equal(ids[taken], expert)


def test_opcheck():
    for family, format in (("qwen3_moe", "nf4"), ("gpt_oss", "plain")):
        case = Case(family, format, torch.float32, tokens=5)
        leaves = {name: t.clone().requires_grad_() for name, t in case.leaves.items()}
        opcheck(ops.experts, tuple(arguments(case, leaves=leaves)))
        opcheck(ops.experts, tuple(arguments(case, save=False)))
        _, pre = ops.experts(*arguments(case))
        need = [True, False, True, False, True, True]
        opcheck(ops.experts_backward, (case.dy, pre, *arguments(case, save=None), need))
        if format == "plain":
            opcheck(ops.experts_dw, (case.dy, pre, *arguments(case, save=None)))


def test_one_graph_for_any_number_of_tokens():
    torch._dynamo.reset()
    case = Case("gpt_oss", "mxfp4", torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def step(x, ids, weights, leaves):
        return case.operator({**leaves, "x": x, "weights": weights}, ids=ids)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    leaves = {name: t.clone().requires_grad_() for name, t in case.leaves.items()}
    del leaves["x"], leaves["weights"]
    for tokens in (5, 9, 2):
        other = Case("gpt_oss", "mxfp4", torch.float32, tokens=tokens, outside=tokens == 9)
        x, weights = (other.leaves[name].requires_grad_() for name in ("x", "weights"))
        for t in (x, other.ids, weights):
            torch._dynamo.mark_dynamic(t, 0)
        results = []
        for function in (step, compiled):
            y = function(x, other.ids, weights, leaves)
            wanted = [x, weights, *(leaves[name] for name in ("a1", "b1", "a2", "b2", "bias1", "bias2"))]
            results.append([y, *torch.autograd.grad(y, wanted, other.dy)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(graphs) == 1


def test_second_derivatives_and_forward_mode_raise():
    case = Case("qwen3_moe", "nf4", torch.float32)
    x = case.leaves["x"].requires_grad_()
    y = case.operator(case.leaves)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y).requires_grad_(), create_graph=True)
    with pytest.raises(
        RuntimeError, match="experts_backward is a gradient and cannot be differentiated again"
    ):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match="experts: forward-mode"):
        torch.func.jvp(lambda x: case.operator({**case.leaves, "x": x}), (x.detach(),), (x.detach(),))


def test_autocast_casts_x():
    case = Case("gpt_oss", "mxfp4", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = case.operator(case.leaves)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, case.operator({**case.leaves, "x": case.leaves["x"].bfloat16()}))


def test_flops():
    case = Case("qwen3_moe", "nf4", torch.float32)
    slots, forward = case.ids.numel(), case.ids.numel() * (2 * INNER * H + H * INNER)
    low = slots * RANK * (2 * INNER + H + H + INNER)
    with FlopCounterMode(display=False) as counter:
        y = case.operator({name: t.requires_grad_() for name, t in case.leaves.items()})
        assert counter.get_total_flops() == 2 * (forward + low)
        y.sum().backward()
    assert counter.get_total_flops() == 2 * (2 * forward + 4 * low)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (17, 9, "activation is 9, wanted"),
        (21, True, "transposed is True for a packed weight|transposed"),
        (12, None, "a1 and b1 must come together"),
        (1, torch.zeros(23, K, dtype=torch.int32), "ids"),
        (2, torch.zeros(23, 1), "weights"),
    ],
)
def test_wrong_arguments_are_named(place, value, message):
    call = arguments(Case("qwen3_moe", "nf4", torch.float32))
    call[place] = value
    with pytest.raises((ValueError, RuntimeError), match=f"experts: .*{message}"):
        ops.experts(*call)


def test_activations_are_the_listed_ones():
    assert [kind.name for kind in Activation if kind.gated] == [
        "SILU",
        "CLAMPED_SILU",
        "GPT_OSS",
        "GELU_TANH",
    ]


def test_torch_func_is_refused_by_name():
    case = Case("qwen3_moe", "nf4", torch.float32)
    with pytest.raises(
        NotImplementedError, match=r"^experts: gradients by torch\.func .* wanted torch\.autograd\.grad"
    ):
        torch.func.grad(lambda x: case.operator(case.leaves | {"x": x}).sum())(case.leaves["x"])
