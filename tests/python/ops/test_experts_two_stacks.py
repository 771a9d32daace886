"""experts with gate and up as two stacks: the bits of one stack with the rows of both, packed and
dequantised; float64; opcheck, one graph, Inductor's code; what does not fit together."""

import pytest
import torch
from torch.library import opcheck

import monograph as mg
from monograph.ops.experts import experts, portable_experts, two_stacks
from monograph.ops.experts_arguments import Activation
from monograph.ops.layout import make_layout, pair_layout, plain_layout
from support.expert_layers import delta, run
from support.ggml_weights import random_weight

ops = torch.ops.monograph
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUND = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11, torch.float32: 2**-19}
E, K, RANK, HIDDEN, INNER = 8, 2, 3, 256, 256
SCALES = (0.5, 1.5)
GPT_OSS = {"alpha": 1.702, "limit": 2.0}  # a limit that is met
# Gate, up, down: 32-blocks, superblocks, mixtures of them, and formats whose scales are tensors.
MIXTURES = [
    ("q8_0", "q8_0", "q8_0"),
    ("q4_0", "q5_1", "iq4_nl"),
    ("q4_k", "q4_k", "q6_k"),
    ("q5_k", "iq4_xs", "q4_k"),
    ("ggml_mxfp4", "q8_0", "ggml_mxfp4"),
    ("mxfp4", "mxfp4", "mxfp4"),
    ("nf4", "q6_k", "nvfp4"),
]
NAMES = ["-".join(one) for one in MIXTURES]


def stack(name, rows, cols, seed):
    """(values, scales, layout) of [E, rows, cols] and its elements in float32."""
    if name in ("mxfp4", "nf4", "nvfp4"):
        generator = torch.Generator().manual_seed(seed)
        packed = mg.quantize(torch.randn(E, rows, cols, generator=generator) * 0.06, name)
        return (packed.values, list(packed.scales), packed.layout), packed.dequantize(torch.float32)
    packed, dense = random_weight(name, E * rows, cols, seed)
    layout = make_layout(packed.format.number, packed.block_size, (E, rows, cols), 0, rows)
    return (packed.values, [], layout), dense.reshape(E, rows, cols)


class Layer:
    def __init__(self, mixture, dtype, tokens=23, activation=Activation.SILU, alternate=False):
        torch.manual_seed(0)
        self.alternate = alternate
        sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        made = [stack(name, *size, 7 + i) for i, (name, size) in enumerate(zip(mixture, sizes, strict=True))]
        (self.gate, gate), (self.up, up), (self.down, down) = made
        self.first = two_stacks(self.gate, self.up)
        both = torch.stack([gate, up], 2).flatten(1, 2) if alternate else torch.cat([gate, up], 1)
        self.dense = both.to(dtype), down.to(dtype)
        self.plain = tuple((d, [], plain_layout(d.shape)) for d in self.dense)
        self.activation = activation
        self.ids = torch.randint(-1, E, (tokens, K))
        self.ids[self.ids == 2] = 1  # one expert has no tokens
        self.leaves = {"x": torch.randn(tokens, HIDDEN).to(dtype), "weights": torch.rand(tokens, K)}
        for i, (out, cols) in enumerate(((2 * INNER, HIDDEN), (HIDDEN, INNER)), 1):
            self.leaves[f"a{i}"] = torch.randn(RANK * E, cols) / 20
            self.leaves[f"b{i}"] = torch.randn(out, RANK * E) / 9
        if alternate:  # gpt-oss: biases too
            for i, rows in enumerate((2 * INNER, HIDDEN), 1):
                self.leaves[f"bias{i}"] = torch.randn(E, rows) / 5
        self.dy = torch.randn(tokens, HIDDEN).to(dtype)

    def call(self, leaves, first=None, second=None, ids=None):
        return experts(
            leaves["x"],
            self.ids if ids is None else ids,
            leaves["weights"],
            first or self.first,
            second or self.down,
            lora1=(leaves["a1"], leaves["b1"], SCALES[0]),
            lora2=(leaves["a2"], leaves["b2"], SCALES[1]),
            bias=(leaves.get("bias1"), leaves.get("bias2")),
            activation=self.activation,
            interleaved=self.alternate,
            **(GPT_OSS if self.alternate else {}),
        )

    def run(self, **stacks):
        return run(lambda own: self.call(own, **stacks), self.leaves, self.dy)

    def arguments(self, *behind):
        own, (alpha, limit) = self.leaves, GPT_OSS.values() if self.alternate else (1.0, 1.0)
        numbers = (*SCALES, int(self.activation), self.alternate, alpha, limit, False)
        factors = (own["a1"], own["b1"], own["a2"], own["b2"])
        routed = (own["x"], self.ids, own["weights"])
        first, second = (*self.first, own.get("bias1")), (*self.down, own.get("bias2"))
        return [*routed, *first, *second, *factors, *numbers, *behind]


def same(got, want):
    for name, one in got.items():
        assert torch.equal(one, want[name]), name


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixture", MIXTURES, ids=NAMES)
def test_bits_are_those_of_the_joined_decoded_weight(mixture, dtype):
    layer = Layer(mixture, dtype)
    same(layer.run(), layer.run(first=layer.plain[0], second=layer.plain[1]))


@pytest.mark.per_isa
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "mxfp4"])
def test_bits_are_those_of_one_packed_stack(name):
    layer = Layer((name,) * 3, torch.bfloat16)
    (gate, scales, layout), (up, others, _) = layer.gate, layer.up

    def joined(a, b):
        return torch.cat([a.reshape(E, -1), b.reshape(E, -1)], 1)

    number, block = (layout[1], layout[2]) if layout[0] < 0 else layout[:2]
    shape = (E, 2 * INNER, HIDDEN)
    whole = make_layout(number, block, shape, 0, 2 * INNER if layout[0] < 0 else 0)
    one = (joined(gate, up), [joined(a, b) for a, b in zip(scales, others, strict=True)], whole)
    same(layer.run(), layer.run(first=one))


@pytest.mark.per_isa
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH], ids=str)
@pytest.mark.parametrize("mixture", MIXTURES[1:4], ids=NAMES[1:4])
def test_gradients_against_float64(mixture, activation):
    layer = Layer(mixture, torch.float32, activation=activation)

    def reference(own):
        first, second = (
            w.double() + delta(own[f"a{i}"], own[f"b{i}"], SCALES[i - 1])
            for i, w in enumerate(layer.dense, 1)
        )
        y = torch.zeros_like(own["x"])
        for j in range(K):
            ids = layer.ids[:, j]
            at = ids.clamp(min=0)
            gate, up = torch.einsum("t i, t o i -> t o", own["x"], first[at]).chunk(2, 1)
            act = torch.nn.functional.silu(gate)
            if activation is Activation.GELU_TANH:
                act = torch.nn.functional.gelu(gate, approximate="tanh")
            d = torch.einsum("t i, t o i -> t o", act * up, second[at])
            y = y + torch.where(ids >= 0, own["weights"][:, j], 0)[:, None] * d
        return y

    want = run(reference, {name: t.double() for name, t in layer.leaves.items()}, layer.dy.double())
    for name, one in layer.run().items():
        distance = (one.double() - want[name]).norm() / want[name].norm()
        assert distance <= ROUND[torch.float32], (name, float(distance))


@pytest.mark.per_isa
def test_threads_and_batch_mates_change_no_bit():
    layer = Layer(MIXTURES[2], torch.bfloat16, tokens=70)
    whole, threads = layer.run(), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            same(layer.run(), whole)
    finally:
        torch.set_num_threads(threads)
    rows = [3, 69, 12]
    leaves = layer.leaves | {name: layer.leaves[name][rows] for name in ("x", "weights")}
    part = run(lambda own: layer.call(own, ids=layer.ids[rows]), leaves, layer.dy[rows])
    for name in ("y", "x", "weights"):
        assert torch.equal(part[name], whole[name][rows]), name


@pytest.mark.per_isa
@pytest.mark.parametrize("mixture", MIXTURES, ids=NAMES)
def test_portable(mixture):
    layer = Layer(mixture, torch.bfloat16)
    both = zip(ops.experts(*layer.arguments(True)), portable_experts(*layer.arguments(True)), strict=True)
    for a, b in both:
        assert (a.double() - b.double()).norm() <= 2 * ROUND[torch.bfloat16] * b.double().norm()


def alternating(name, dtype, tokens=23):
    return Layer((name, name, "ggml_mxfp4"), dtype, tokens, Activation.GPT_OSS, alternate=True)


@pytest.mark.per_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["ggml_mxfp4", "q8_0", "q4_k"])
def test_rows_in_turns_have_the_bits_of_one_stack(name, dtype):
    """gpt-oss: its activation, biases and LoRA. Decoded, and as one packed stack."""
    layer = alternating(name, dtype)
    found = layer.run()
    same(found, layer.run(first=layer.plain[0], second=layer.plain[1]))
    (gate, _, layout), (up, _, _) = layer.gate, layer.up
    rows = torch.stack([one.reshape(E * INNER, -1) for one in (gate, up)], 1).flatten()
    whole = make_layout(layout[1], layout[2], (E, 2 * INNER, HIDDEN), 0, 2 * INNER)
    same(found, layer.run(first=(rows, [], whole)))


@pytest.mark.per_isa
def test_rows_in_turns_have_the_bits_of_gpt_oss_own_mxfp4():
    """The stack that OpenAI ships, [E, 2I, blocks, 16] and scales, against the file's blocks of the same
    codes, the order of nibbles apart."""
    layer = Layer(("mxfp4", "mxfp4", "mxfp4"), torch.bfloat16, 23, Activation.GPT_OSS, alternate=True)

    def of_ggml(weight, rows, cols):
        codes, (scales,), _ = weight
        flat = codes.reshape(-1, 16)
        flat = torch.stack([flat & 15, flat >> 4], 2).reshape(-1, 32)
        blocks = torch.cat([scales.reshape(-1, 1), flat[:, :16] | flat[:, 16:] << 4], 1)
        return blocks.flatten(), [], make_layout(30, 32, (E, rows, cols), 0, rows)

    gate, up = (of_ggml(one, INNER, HIDDEN) for one in (layer.gate, layer.up))
    down = of_ggml(layer.down, HIDDEN, INNER)
    codes, scales = (
        torch.stack([a.reshape(E * INNER, -1), b.reshape(E * INNER, -1)], 1).flatten()
        for a, b in ((layer.gate[0], layer.up[0]), (layer.gate[1][0], layer.up[1][0]))
    )
    one = (codes, [scales], [*layer.gate[2][:2], E, 2 * INNER, HIDDEN])
    same(layer.run(first=two_stacks(gate, up), second=down), layer.run(first=one))


@pytest.mark.per_isa
@pytest.mark.parametrize("name", ["ggml_mxfp4", "q4_k"])
def test_rows_in_turns_against_float64(name):
    layer = alternating(name, torch.float32)

    def reference(own):
        first, second = (
            w.double() + delta(own[f"a{i}"], own[f"b{i}"], SCALES[i - 1])
            for i, w in enumerate(layer.dense, 1)
        )
        y = torch.zeros_like(own["x"])
        for j in range(K):
            ids = layer.ids[:, j]
            at = ids.clamp(min=0)
            pre = torch.einsum("t i, t o i -> t o", own["x"], first[at]) + own["bias1"][at]
            gate, up = pre[:, ::2].clamp(max=GPT_OSS["limit"]), pre[:, 1::2]
            up = up.clamp(-GPT_OSS["limit"], GPT_OSS["limit"])
            h = (up + 1) * gate * torch.sigmoid(GPT_OSS["alpha"] * gate)
            d = torch.einsum("t i, t o i -> t o", h, second[at]) + own["bias2"][at]
            y = y + torch.where(ids >= 0, own["weights"][:, j], 0)[:, None] * d
        return y

    want = run(reference, {name: t.double() for name, t in layer.leaves.items()}, layer.dy.double())
    found = layer.run()
    assert found.keys() == want.keys()
    for name, one in found.items():
        distance = (one.double() - want[name]).norm() / want[name].norm()
        assert distance <= ROUND[torch.float32], (name, float(distance))


@pytest.mark.per_isa
def test_rows_in_turns_portable_and_in_one_graph():
    layer = alternating("ggml_mxfp4", torch.bfloat16)
    both = zip(ops.experts(*layer.arguments(True)), portable_experts(*layer.arguments(True)), strict=True)
    for a, b in both:
        assert (a.double() - b.double()).norm() <= 2 * ROUND[torch.bfloat16] * b.double().norm()
    torch._dynamo.reset()
    compiled = torch.compile(layer.call, fullgraph=True, backend="aot_eager")
    same(run(compiled, layer.leaves, layer.dy), layer.run())


def test_slots_as_a_list():
    layer = Layer(MIXTURES[2], torch.float32)
    layer.ids = layer.ids.clamp(min=0)
    _, _, _, *rest = layer.arguments()
    rows = torch.arange(23).repeat_interleave(K)
    found = ops.experts_slots(layer.leaves["x"], rows, layer.ids.reshape(-1), *rest)
    plain = [*layer.plain[0], None, *layer.plain[1], None, *rest[8:]]
    same({"d": found}, {"d": ops.experts_slots(layer.leaves["x"], rows, layer.ids.reshape(-1), *plain)})


def test_opcheck():
    layer = Layer(MIXTURES[2], torch.float32, tokens=5)
    given = layer.arguments(True)
    for place in (0, 2, 11, 12, 13, 14):
        given[place] = given[place].clone().requires_grad_()
    opcheck(ops.experts, tuple(given))
    _, pre = ops.experts(*layer.arguments(True))
    need = [True, True, False, False, True, True]
    opcheck(ops.experts_backward, (layer.dy, pre, *layer.arguments(need)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_with_the_gradients_of_eager(backend):
    torch._dynamo.reset()
    layer = Layer(MIXTURES[2], torch.bfloat16)
    compiled = torch.compile(layer.call, fullgraph=True, backend=backend)
    eager = layer.run()
    same(run(compiled, layer.leaves, layer.dy), eager)


def test_what_does_not_fit_is_named():
    layer = Layer(MIXTURES[0], torch.float32)
    values, scales, layout = layer.first
    other = stack("q8_0", INNER // 2, HIDDEN, 3)[0]
    kinds = (layer.call, lambda own, first: portable_experts(*given(layer, first)))
    plain = (layer.dense[0][:, :INNER].contiguous(), [], plain_layout((E, INNER, HIDDEN)))
    for call in kinds:
        for first, message in (
            ((values, scales, [*layout[:2], 99, *layout[3:]]), "layout1 has .* entries, wanted"),
            ((values, [], layout), "layout1 claims 0 scales of gate, scales1 has 0 tensors"),
            (two_stacks(layer.gate, other), "gate .* up .*"),
            (two_stacks(plain, layer.up), "gate and up are two stacks and one is plain"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=f"experts: {message}"):
                call(layer.leaves, first=first)
    for place, value, message in ((17, 5, "no gate"), (18, True, ROWS)):
        wrong = Layer(MIXTURES[1], torch.float32).arguments(True)
        wrong[place] = value
        for call in (ops.experts, portable_experts):
            with pytest.raises((ValueError, RuntimeError), match=message):
                call(*wrong)
    second = layer.arguments(True)
    second[9] = pair_layout(second[9], 0, second[9])
    with pytest.raises(RuntimeError, match="layout has version -2"):
        ops.experts(*second)


ROWS = (
    "interleaved is [Tt]rue for two stacks: rows of q4_0 and of q5_1 cannot alternate, "
    "wanted one format of ggml's blocks"
)


def given(layer, first):
    arguments = layer.arguments(True)
    arguments[3:6] = first
    return arguments


def test_plain_gradients_are_refused_of_two_stacks():
    layer = Layer(MIXTURES[0], torch.float32)
    _, pre = ops.experts(*layer.arguments(True))
    with pytest.raises(RuntimeError, match="the weights are packed, wanted plain ones"):
        ops.experts_dw(layer.dy, pre, *layer.arguments())
