"""experts by torch's grouped_mm: float64 and our kernels within the roundings that it adds, slots that are
skipped, panels, memory that is not initialised, one graph. On the CPU, by torch's own grouped_mm there."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional as F

import monograph as mg
from monograph.diagnosis.selftest.device import PeakMemory
from monograph.ops import experts_grouped, experts_torch, providers
from monograph.ops.experts import Activation, experts, two_stacks
from monograph.ops.experts_grouped import Routes
from monograph.ops.layout import make_layout, plain_layout
from support.expert_layers import FAMILIES, RANK, Case, E, H, run
from support.ggml_weights import random_weight

ops = torch.ops.monograph
# Roundings between an input and an output, each of half of this: those of the operator (tests of `experts`),
# and of each of two products its dense part, its low-rank part, and their sum before the bias.
ROUND = {torch.bfloat16: 8 * 2**-8, torch.float16: 8 * 2**-11, torch.float32: 2**-18}


@pytest.fixture(autouse=True)
def by_torch():
    with providers.using({"experts": "torch"}):
        yield


@pytest.fixture
def strict(monkeypatch):
    """grouped_mm as a card has it: strides of 16 bytes, and what it does not write is NaN."""
    real, calls = F.grouped_mm, []

    def checked(a, b, *, offs):
        calls.append((a.shape, b.shape))
        assert offs.dtype == torch.int32
        for t in (a, b):
            one, *far = sorted(t.stride()[-2:])
            assert one == 1, t.stride()
            assert all(s * t.element_size() % 16 == 0 for s in (*far, *t.stride()[:-2])), t.stride()
            assert t.storage_offset() * t.element_size() % 16 == 0
        out = real(a, b, offs=offs)
        if b.dim() == 3:
            assert b.shape[0] == offs.numel()
            out[int(offs[-1]) :] = float("nan")
        else:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    monkeypatch.setattr(experts_grouped, "grouped_mm", checked)
    return calls


def wide(leaves):
    return {name: t.double() for name, t in leaves.items()}


def close(got, want, dtype, corners=1):
    for name, one in got.items():
        assert one.isfinite().all(), name
        distance = (one.double() - want[name].double()).norm()
        assert distance <= corners * ROUND[dtype] * want[name].double().norm(), (name, float(distance))


def reference(case):
    return run(
        lambda own: case.reference(own, (case.dense1, case.dense2)), wide(case.leaves), case.dy.double()
    )


@pytest.mark.parametrize("dtype", list(ROUND), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_of_transformers_modules(family, dtype, strict):
    """Ranks of 3, an expert without tokens, slots outside. Corners of the clamp: as in test_experts.py."""
    case = Case(family, "plain", dtype, outside=True)
    got = run(case.operator, case.leaves, case.dy)
    corners = 3 if family == "deepseek_v4" and dtype != torch.float32 else 1
    close(got, reference(case), dtype, corners)
    assert strict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["nf4", "mxfp4", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_weights_and_our_kernels(family, format, dtype, strict):
    case = Case(family, format, dtype, outside=True)
    got = run(case.operator, case.leaves, case.dy)
    close(got, reference(case), dtype)
    with providers.using({"experts": "monograph"}):
        close(got, run(case.operator, case.leaves, case.dy), dtype)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_gradients_of_plain_weights(family, strict):
    case = Case(family, "plain", torch.float32, outside=True)
    leaves = {"w1": case.first[0], "w2": case.second[0]}

    def operator(own):
        first, second = ((own[name], [], plain_layout(own[name].shape)) for name in ("w1", "w2"))
        return case.operator(case.leaves, first=first, second=second)

    def in_float64(own):
        dense = [own[name].transpose(1, 2) if case.layer.transposed else own[name] for name in ("w1", "w2")]
        return case.reference(wide(case.leaves), tuple(dense))

    close(run(operator, leaves, case.dy), run(in_float64, wide(leaves), case.dy.double()), torch.float32)


ROUTES = {
    "all at one": lambda ids: torch.full_like(ids, 5),
    "one slot": lambda ids: torch.full_like(ids, -1).index_fill_(0, torch.tensor([3]), 6),
    "all skipped": lambda ids: torch.full_like(ids, E),
    "two experts": lambda ids: 2 + 5 * (ids % 2),
}


@pytest.mark.parametrize("panel", [1, 1 << 28])
@pytest.mark.parametrize("routes", ROUTES)
def test_routes(routes, panel, strict, monkeypatch):
    monkeypatch.setattr(experts_grouped, "PANEL_BYTES", panel)
    case = Case("gpt_oss", "mxfp4", torch.float32)
    case.ids = ROUTES[routes](case.ids)
    got, want = run(case.operator, case.leaves, case.dy), reference(case)
    if routes == "all skipped":
        assert all(torch.all(one == 0) for one in got.values())
    else:
        close(got, want, torch.float32)


@pytest.mark.parametrize("dtype", list(ROUND), ids=str)
@pytest.mark.parametrize("format", ["plain", "nf4", "nvfp4"])
def test_panels_change_no_bit(format, dtype, strict, monkeypatch):
    """Two experts of the first weight at a time, one of the last panel alone; of a plain weight of another
    dtype too."""
    case = Case("qwen3_moe", format, dtype, outside=True)
    if format == "plain":
        first, second = (
            (w[0].to(torch.float32 if dtype != torch.float32 else torch.float16), [], w[2])
            for w in (case.first, case.second)
        )
        layer = {"first": first, "second": second}
    else:
        layer = {}
    want = run(lambda own: case.operator(own, **layer), case.leaves, case.dy)
    calls = len(strict)
    for experts_at_a_time in (1, 2, 3):
        size = case.dense1[0].numel() * dtype.itemsize * experts_at_a_time
        monkeypatch.setattr(experts_grouped, "PANEL_BYTES", size)
        got = run(lambda own: case.operator(own, **layer), case.leaves, case.dy)
        assert all(torch.equal(one, want[name]) for name, one in got.items())
    assert len(strict) > 4 * calls


def other_stacks(name):
    """Gate, up and down of 8 experts of 256 x 256, and dense: blocks with their scales, groups of rows, and
    flat blocks that lie on two experts."""
    made = []
    for seed in range(3):
        if name == "nf4 across":
            packed = mg.quantize(
                torch.randn(E, 250, 250, generator=torch.Generator().manual_seed(seed)), "nf4"
            )
            made.append(
                ((packed.values, list(packed.scales), packed.layout), packed.dequantize(torch.float32))
            )
            continue
        if name == "int4":
            parts = [mg.quantize(torch.randn(256, 256), "int4") for _ in range(E)]
            values = torch.cat([p.values.reshape(-1) for p in parts])
            scales = [
                torch.cat([s.reshape(-1) for s in s]) for s in zip(*(p.scales for p in parts), strict=True)
            ]
            layout = make_layout(parts[0].format.number, parts[0].block_size, (E, 256, 256), 0, 256)
            dense = torch.stack([p.dequantize(torch.float32) for p in parts])
            made.append(((values, scales, layout), dense))
            continue
        packed, dense = random_weight(name, E * 256, 256, seed)
        layout = make_layout(packed.format.number, packed.block_size, (E, 256, 256), 0, 256)
        made.append(((packed.values, [], layout), dense.reshape(E, 256, 256)))
    return made


@pytest.mark.parametrize("panel", [1 << 18, 1 << 28])
@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("name", ["q4_k", "ggml_mxfp4", "int4", "nf4 across"])
def test_two_stacks(name, alternate, panel, strict, monkeypatch):
    if alternate and name not in ("q4_k", "ggml_mxfp4"):
        pytest.skip("rows of other formats cannot alternate")
    monkeypatch.setattr(experts_grouped, "PANEL_BYTES", panel)
    torch.manual_seed(1)
    (gate, dense_gate), (up, dense_up), (down, dense_down) = other_stacks(name)
    size = dense_gate.shape[1]
    both = (
        torch.stack([dense_gate, dense_up], 2).flatten(1, 2)
        if alternate
        else torch.cat([dense_gate, dense_up], 1)
    )
    ids = torch.randint(-1, E, (9, 2))
    leaves = {"x": torch.randn(9, size) / 16, "weights": torch.rand(9, 2), "bias": torch.randn(E, 2 * size)}
    leaves |= {"a": torch.randn(RANK * E, size) / 9, "b": torch.randn(2 * size, RANK * E) / 9}
    dy = torch.randn(9, size)

    def call(own, first, second):
        kind = {"activation": Activation.GPT_OSS, "interleaved": alternate, "limit": 2.0}
        low = {"lora1": (own["a"], own["b"], 0.5), "bias": (own["bias"], None)}
        return experts(own["x"], ids, own["weights"], first, second, **low, **kind)

    got = run(lambda own: call(own, two_stacks(gate, up), down), leaves, dy)
    plain = [(d, [], plain_layout(d.shape)) for d in (both, dense_down)]
    with providers.using({"experts": "monograph"}):
        want = run(lambda own: call(own, *plain), leaves, dy)
    close(got, want, torch.float32)


def test_odd_sizes_are_padded(strict):
    """Rows of 36 and 20 numbers in bfloat16, ranks of 12 and 4."""
    torch.manual_seed(0)
    w1, w2 = torch.randn(4, 40, 36).bfloat16() / 6, torch.randn(4, 36, 20).bfloat16() / 4
    ids, dy = torch.randint(0, 4, (11, 2)), torch.randn(11, 36).bfloat16()
    leaves = {"x": torch.randn(11, 36).bfloat16(), "weights": torch.rand(11, 2)}
    leaves |= {"a1": torch.randn(12 * 4, 36) / 6, "b1": torch.randn(40, 12 * 4) / 6}
    leaves |= {"a2": torch.randn(4 * 4, 20) / 4, "b2": torch.randn(36, 4 * 4) / 4}

    def call(own):
        low = {f"lora{i}": (own[f"a{i}"], own[f"b{i}"], 1.0) for i in (1, 2)}
        return experts(
            own["x"], ids, own["weights"], *((w, [], plain_layout(w.shape)) for w in (w1, w2)), **low
        )

    got = run(call, leaves, dy)
    with providers.using({"experts": "monograph"}):
        close(got, run(call, leaves, dy), torch.bfloat16)


def test_only_active_experts_are_read():
    ids = torch.tensor([[6, 2], [-1, 6], [2, 9]])
    routes = Routes(ids, 8)
    assert routes.read.tolist() == [2, 6, 6, 6, 6, 6]
    assert routes.turns.tolist()[:2] == [2, 6]
    assert routes.counts.tolist() == [0, 0, 2, 0, 0, 0, 2, 0]
    assert torch.equal(routes.to_slots(ids.flatten()[routes.order]), ids.flatten())


@pytest.mark.parametrize("save", [True, False])
def test_memory_is_bounded_by_a_panel(save, monkeypatch):
    """64 experts of 0.5 MiB in bfloat16: 32 MiB dense. Beside results and what the slots take, two panels:
    the one that is multiplied, and the bytes and scales that it is decoded from, a quarter and more of it."""
    panel, count, size = 2 << 20, 64, 512
    monkeypatch.setattr(experts_grouped, "PANEL_BYTES", panel)
    torch.manual_seed(0)
    stacks = []
    for rows, cols in ((size, size), (size, size // 2)):
        packed = mg.quantize(torch.randn(count, rows, cols), "mxfp4")
        stacks.append((packed.values, list(packed.scales), packed.layout))
    x = torch.randn(64, size).bfloat16()
    ids, weights = torch.randint(0, count, (64, 2)), torch.rand(64, 2)
    numbers = (0.0, 0.0, 0, False, 1.0, 1.0, False)
    given = (x, ids, weights, *stacks[0], None, *stacks[1], None, None, None, None, None, *numbers)
    slots = 128 * size * 4 * 12  # a dozen of rows in float32
    with PeakMemory() as forward:
        _, pre = experts_torch.experts(*given, save)
    with PeakMemory() as backward:
        experts_torch.experts_backward(torch.randn_like(x), pre, *given, [True, True] + [False] * 4)
    for found in (forward, backward):
        assert panel < found.peak <= 2 * panel + slots, (found.peak, panel, slots)
    assert 2 * panel + slots < count * size * size * 2 // 2


def arguments(case, *behind, leaves=None):
    own = leaves or case.leaves
    options = {"interleaved": False, "alpha": 1.0, "limit": 1.0, "transposed": False} | case.options
    return [
        *(own["x"], case.ids, own["weights"]),
        *(*case.first, own.get("bias1"), *case.second, own.get("bias2")),
        *(own["a1"], own["b1"], own["a2"], own["b2"], 0.5, 1.5),
        *(int(options["activation"]), *(options[n] for n in ("interleaved", "alpha", "limit", "transposed"))),
        *behind,
    ]


@pytest.mark.parametrize("format", ["nf4", "plain"])
def test_the_host_reads_nothing(format):
    """Fakes have no data: what depended on it would raise."""
    case = Case("gpt_oss", format, torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value):
            if isinstance(value, torch.Tensor):
                return mode.from_tensor(value)
            return [fake(v) for v in value] if isinstance(value, list) else value

        given = [fake(value) for value in arguments(case)]
        y, pre = experts_torch.experts(*given, True)
        found = experts_torch.experts_backward(fake(case.dy), pre, *given, [True] * 6)
    assert list(y.shape) == list(case.leaves["x"].shape)
    assert list(pre.shape) == [case.ids.numel(), case.dense1.shape[1]]
    want = [case.leaves[n] for n in ("x", "weights", "bias1", "bias2", "a1", "b1", "a2", "b2")]
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in want]


def test_what_is_not_needed_is_empty_and_pre_is_computed_again():
    case = Case("gpt_oss", "mxfp4", torch.float32, outside=True)
    y, pre = ops.experts(*arguments(case, True))
    again, empty = ops.experts(*arguments(case, False))
    assert torch.equal(y, again)
    assert list(empty.shape) == [0, pre.shape[1]]
    nowhere = int(((case.ids < 0) | (case.ids >= E)).sum())
    assert nowhere > 0
    assert torch.all(pre[-nowhere:] == 0)
    whole = ops.experts_backward(case.dy, pre, *arguments(case, [True] * 6))
    other = ops.experts_backward(case.dy, empty, *arguments(case, [True] * 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    for i, outputs in enumerate(((0,), (1,), (2,), (3,), (4, 5), (6, 7))):
        some = ops.experts_backward(case.dy, pre, *arguments(case, [j == i for j in range(6)]))
        assert [n for n, t in enumerate(some) if t.numel()] == list(outputs)
        assert all(torch.equal(some[n], whole[n]) for n in outputs)


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (3, 0)])
def test_no_tokens_and_no_routes(tokens, k):
    case = Case("gpt_oss", "mxfp4", torch.float32, tokens=max(tokens, 3))
    case.ids, case.dy = case.ids[:tokens, :k], case.dy[:tokens]
    case.leaves |= {"x": case.leaves["x"][:tokens], "weights": case.leaves["weights"][:tokens, :k]}
    got = run(case.operator, case.leaves, case.dy)
    assert all(torch.all(t == 0) for t in got.values())
    assert got["y"].shape == (tokens, H)


def test_a_slot_that_is_skipped_brings_no_nan(strict):
    case = Case("qwen3_moe", "nf4", torch.float32)
    case.ids[4] = -1
    want = run(case.operator, case.leaves, case.dy)
    case.leaves["x"][4], case.leaves["weights"][4], case.dy[4] = (float("nan"),) * 3
    got = run(case.operator, case.leaves, case.dy)
    for name, one in got.items():
        assert torch.equal(one, want[name]), name


def test_opcheck():
    for family, format in (("qwen3_moe", "nf4"), ("gpt_oss", "plain")):
        case = Case(family, format, torch.float32, tokens=5)
        leaves = {name: t.clone().requires_grad_() for name, t in case.leaves.items()}
        opcheck(ops.experts, tuple(arguments(case, True, leaves=leaves)))
        opcheck(ops.experts, tuple(arguments(case, False)))
        _, pre = ops.experts(*arguments(case, True))
        need = [True, False, True, False, True, True]
        opcheck(ops.experts_backward, (case.dy, pre, *arguments(case, need)))
        if format == "plain":
            opcheck(ops.experts_dw, (case.dy, pre, *arguments(case)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_with_the_gradients_of_eager(backend):
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    case = Case("gpt_oss", "mxfp4", torch.bfloat16)
    fixed = {name: t for name, t in case.leaves.items() if name not in ("x", "weights")}

    def step(own, ids):
        return case.operator({**fixed, **own}, ids=ids)

    compiled = torch.compile(step, fullgraph=True, backend=counted)
    for tokens in (5, 9, 2):
        other = Case("gpt_oss", "mxfp4", torch.bfloat16, tokens=tokens, outside=tokens == 9)
        own = {name: other.leaves[name] for name in ("x", "weights")}

        def marked(function, ids=other.ids):
            def call(leaves):
                for t in (*leaves.values(), ids):
                    torch._dynamo.mark_dynamic(t, 0)
                return function(leaves, ids)

            return call

        got, want = run(marked(compiled), own, other.dy), run(step_of(step, other.ids), own, other.dy)
        assert all(torch.equal(one, want[name]) for name, one in got.items())
    assert len(graphs) == 1


def step_of(step, ids):
    return lambda own: step(own, ids)


def test_float64_is_refused_by_name():
    case = Case("qwen3_moe", "plain", torch.float64)
    case.leaves["weights"] = case.leaves["weights"].double()
    with pytest.raises(ValueError, match="experts on cpu: torch: the dtype is float64, wanted bfloat16, fl"):
        case.operator(case.leaves)


@pytest.mark.parametrize(
    ("capability", "said"),
    [((9, 0), ""), ((10, 0), ""), ((8, 6), "on sm_86"), ((12, 0), "on sm_120"), ((8, 0), "on sm_80")],
)
def test_cards_whose_offsets_are_read_are_named(capability, said, monkeypatch):
    monkeypatch.setattr(experts_torch, "capability_of", lambda device: capability)
    note = experts_torch.note(torch.device("cuda"))
    assert note == (f"grouped_mm of torch copies offsets to the host {said}" if said else "")
    assert experts_torch.note(torch.device("cpu")) == ""
    assert experts_torch.why_not("experts", torch.zeros(1)) is None
    monkeypatch.setattr(experts_torch, "capability_of", lambda device: (7, 5))
    assert "compute capability 7.5, wanted 8.0" in experts_torch.why_not("experts", torch.zeros(1))
