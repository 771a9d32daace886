"""experts on formats whose rows are decoded one by one: groups of a row, ggml's blocks. The packed operator
has the bits of the operator on the stack that numpy or the gguf package decoded."""

import pytest
import torch
from torch.library import opcheck

import monograph as mg
from monograph.ops.experts import experts, portable_experts
from monograph.ops.formats import GGML_FORMATS
from monograph.ops.layout import make_layout, plain_layout
from support.expert_layers import run
from support.ggml_weights import random_weight
from support.group_weights import group_weight

pytestmark = pytest.mark.per_isa
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E, K, RANK = 4, 2, 3
# Format, symmetric, one scale for a matrix; gate and up apart; the groups of rows of 500 and of 33.
GROUPS = {
    "int4": ("int4-bf16", True, False, True, (500, 33)),
    "int4-asymmetric": ("int4-fp16", False, False, True, (20, 11)),
    "int4-whole": ("int4-fp32", False, False, False, (500, 11)),
    "int8": ("int8-bf16", True, False, True, (500, 33)),
    "int8-asymmetric": ("int8-fp32", False, False, True, (100, 33)),
    "int8-one": ("int8-fp16", True, True, True, (500, 33)),
    "int8-packed": ("int8-packed-bf16", True, False, False, (500, 33)),
    "int8-packed-asymmetric": ("int8-packed-fp16", False, False, True, (20, 33)),
    "fp8-row": ("fp8-row-bf16", True, False, True, (500, 33)),
    "fp8-one": ("fp8-row-fp32", True, True, True, (500, 33)),
}


def stacked(parts, rows):
    """(values, scales, layout) of matrices of `rows` rows as one stack [E, ...]."""
    values = torch.cat([p.values.reshape(-1) for p in parts])
    scales = [torch.cat([s.reshape(-1) for s in own]) for own in zip(*(p.scales for p in parts), strict=True)]
    shape = (E, len(parts) // E * rows, parts[0].shape[1])
    return values, scales, make_layout(parts[0].format.number, parts[0].block_size, shape, 0, rows)


class Layer:
    """Two stacks and what they hold in `dtype`, decoded by another program."""

    def __init__(self, name, dtype, tokens=23):
        torch.manual_seed(0)
        if name in GROUPS:
            kind, symmetric, one, apart, groups = GROUPS[name]
            self.hidden, self.inner = 500, 33

            def make(rows, cols, seed):
                group = groups[0] if cols == 500 else groups[1]
                made = group_weight(kind, (rows, cols, group), symmetric, seed, one)
                return made.packed, made.dense(dtype)
        else:
            self.hidden, self.inner, apart = 256, 256, True

            def make(rows, cols, seed):
                packed, dense = random_weight(name, rows, cols, seed)
                return packed, dense.to(dtype)

        rows = self.inner if apart else 2 * self.inner
        ups = [make(rows, self.hidden, i) for i in range(E * (2 if apart else 1))]
        downs = [make(self.hidden, self.inner, 50 + i) for i in range(E)]
        self.packed = stacked([p for p, _ in ups], rows), stacked([p for p, _ in downs], self.hidden)
        shapes = (E, 2 * self.inner, self.hidden), (E, self.hidden, self.inner)
        self.dense = tuple(
            torch.cat([d for _, d in own]).reshape(shape)
            for own, shape in zip((ups, downs), shapes, strict=True)
        )
        self.plain = tuple((d, [], plain_layout(d.shape)) for d in self.dense)
        self.ids = torch.randint(-1, E, (tokens, K))
        self.ids[self.ids == 2] = 1  # one expert has no tokens
        self.leaves = {"x": torch.randn(tokens, self.hidden).to(dtype), "weights": torch.rand(tokens, K)}
        for i, (out, cols) in enumerate(((2 * self.inner, self.hidden), (self.hidden, self.inner)), 1):
            self.leaves[f"a{i}"] = torch.randn(RANK * E, cols) / 20
            self.leaves[f"b{i}"] = torch.randn(out, RANK * E) / 9
        self.dy = torch.randn(tokens, self.hidden).to(dtype)

    def call(self, leaves, stacks, rows=slice(None)):
        lora1, lora2 = ((leaves[f"a{i}"], leaves[f"b{i}"], 0.5 * i) for i in (1, 2))
        ids = self.ids[rows]
        return experts(leaves["x"], ids, leaves["weights"], *stacks, lora1=lora1, lora2=lora2)

    def arguments(self, stacks, *last):
        low = [self.leaves[name] for name in ("a1", "b1", "a2", "b2")]
        first, second = stacks
        routes = (self.leaves["x"], self.ids, self.leaves["weights"])
        return [*routes, *first, None, *second, None, *low, 0.5, 1.0, 0, False, 1.0, 1.0, False, *last]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*GROUPS, *GGML_FORMATS])
def test_values_and_gradients_have_the_bits_of_the_decoded_stack(name, dtype):
    layer = Layer(name, dtype)
    packed = run(lambda own: layer.call(own, layer.packed), layer.leaves, layer.dy)
    plain = run(lambda own: layer.call(own, layer.plain), layer.leaves, layer.dy)
    for key, one in packed.items():
        assert one.isfinite().all(), key
        assert torch.equal(one, plain[key]), key


@pytest.mark.parametrize("name", [*GROUPS, *GGML_FORMATS])
def test_dequantize_of_a_stack(name):
    for dtype in DTYPES:
        layer = Layer(name, dtype, tokens=1)
        for (values, scales, layout), want in zip(layer.packed, layer.dense, strict=True):
            assert torch.equal(torch.ops.monograph.dequantize(values, scales, layout, dtype), want)


@pytest.mark.parametrize("name", ["int4-asymmetric", "int8-one", "fp8-row", "q4_k"])
def test_a_token_alone_in_any_batch_and_with_any_threads(name):
    layer, threads = Layer(name, torch.bfloat16, tokens=37), torch.get_num_threads()

    def results(rows):
        leaves = layer.leaves | {key: layer.leaves[key][rows] for key in ("x", "weights")}
        return run(lambda own: layer.call(own, layer.packed, rows), leaves, layer.dy[rows])

    whole = results(list(range(37)))
    for rows in ([0], [36], [5, 6], [30, 2, 2, 17]):
        part = results(rows)
        assert all(torch.equal(part[key], whole[key][rows]) for key in ("y", "x", "weights")), rows
    try:
        torch.set_num_threads(3)
        other = results(list(range(37)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other[key]) for key, one in whole.items())


@pytest.mark.parametrize("name", ["int4-asymmetric", "int8-one", "int8-packed-asymmetric", "fp8-row", "q6_k"])
def test_portable_and_opcheck(name):
    layer = Layer(name, torch.bfloat16, tokens=5)
    y, pre = torch.ops.monograph.experts(*layer.arguments(layer.packed, True))
    for one, other in zip((y, pre), portable_experts(*layer.arguments(layer.packed, True)), strict=True):
        assert (one.double() - other.double()).norm() <= 2**-5 * one.double().norm()
    exact = portable_experts(*layer.arguments(layer.plain, True))
    assert all(map(torch.equal, portable_experts(*layer.arguments(layer.packed, True)), exact))
    opcheck(torch.ops.monograph.experts, tuple(layer.arguments(layer.packed, True)))
    call = (layer.dy, pre, *layer.arguments(layer.packed, [True] * 6))
    opcheck(torch.ops.monograph.experts_backward, call)


def test_one_graph():
    torch._dynamo.reset()
    layer = Layer("int4-asymmetric", torch.float32)

    def call(own):
        return layer.call(own, layer.packed)

    compiled = torch.compile(call, fullgraph=True, backend="inductor")
    eager, graph = (run(function, layer.leaves, layer.dy) for function in (call, compiled))
    assert all(torch.equal(one, graph[key]) for key, one in eager.items())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("format", "rows"), [("int4", 13), ("int4", 16), ("int8", 13), ("fp8", 13)])
def test_quantize_makes_a_grid_of_each_expert(format, rows, symmetric):
    if format == "fp8" and not symmetric:
        pytest.skip("fp8 has no zero points")
    torch.manual_seed(1)
    weight, rule = torch.randn(3, rows, 100).bfloat16(), "default" if symmetric else "minmax"
    stack = mg.quantize(weight, format, block_size=20 if format == "int4" else 0, rule=rule)
    assert (stack.shape, stack.grid_rows) == ((3, rows, 100), rows)
    alone = [mg.quantize(w, format, block_size=stack.block_size, rule=rule) for w in weight]
    for i, one in enumerate(alone):
        part = stack.slice_experts(i, 1)
        assert torch.equal(part.values.reshape(-1), one.values.reshape(-1))
        for own, wanted in zip(part.scales, one.scales, strict=True):
            assert torch.equal(own.reshape(-1), wanted.reshape(-1))
        assert torch.equal(part.dequantize()[0], one.dequantize())
    assert torch.equal(stack.dequantize(), torch.stack([one.dequantize() for one in alone]))
    weight[1, 2, 3] = torch.nan
    with pytest.raises(RuntimeError, match=f"not finite at flat index {(rows + 2) * 100 + 3}"):
        mg.quantize(weight, format, block_size=stack.block_size, rule=rule)
