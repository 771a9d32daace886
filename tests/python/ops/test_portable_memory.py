"""Portable implementations hold a bounded amount of memory, and give the same bits in parts of any size."""

import pytest
import torch

import monograph as mg
import monograph.ops.inductor_decompositions as decompositions
from monograph.diagnosis.selftest.device import PeakMemory
from monograph.ops import dequantize, varlen_attention
from monograph.ops.experts_portable import portable_experts
from monograph.ops.formats import FORMATS
from monograph.ops.gated_delta_rule import portable_gated_delta_rule_backward
from monograph.upstream.torch_names import (
    make_boxed_func,
    min_cut_rematerialization_partition,
)

MIB = 1 << 20


def peak(work):
    with PeakMemory() as found:
        work()
    return found.peak


def packed(name, *shape):
    return mg.quantize(torch.randn(shape).bfloat16(), name, double_quant=FORMATS[name].double_quant)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantise_holds_the_dense_weight_and_a_panel(name, monkeypatch):
    """Eight times the dense weight before there were panels."""
    w = packed(name, 1024, 1024)
    found = peak(lambda: dequantize.portable_dequantize(w.values, w.scales, w.layout, torch.bfloat16))
    assert found <= 2 * MIB + 8.1 * MIB
    want = w.dequantize(torch.bfloat16)
    monkeypatch.setattr(dequantize, "PANEL", 5000)
    small = peak(lambda: dequantize.portable_dequantize(w.values, w.scales, w.layout, torch.bfloat16))
    assert small <= 3.8 * MIB  # square blocks: at least a row of blocks, 128 x 1024 elements
    assert torch.equal(dequantize.portable_dequantize(w.values, w.scales, w.layout, torch.bfloat16), want)
    fused = dequantize.fused_dequantize(w.values, w.scales, w.layout, torch.bfloat16)
    assert torch.equal(fused, want)


@pytest.mark.parametrize("capped", [False, True])
def test_attention_in_parts(monkeypatch, capped):
    """The gradients against autograd through a dense softmax; memory with the part, not with the square."""
    torch.manual_seed(0)
    tokens, cu = 96, torch.tensor([0, 30, 31, 90], dtype=torch.int32)
    q, k, v = (torch.randn(tokens, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True) if capped else None
    options = (True, 8 if capped else 0, 0.25, 5.0 if capped else 0.0)
    arguments = (cu, cu, None, sinks, *options)
    dout = torch.randn(tokens, 4, 16)
    found = {}
    for size in (1 << 22, 3000):
        monkeypatch.setattr(varlen_attention, "PORTABLE_SCORES", size)
        with torch.no_grad():
            out, lse = varlen_attention.portable_varlen_attention(q, k, v, *arguments)
            grads = varlen_attention.portable_varlen_attention_backward(dout, q, k, v, out, lse, *arguments)
        found[size] = [out, lse, *grads]
    for a, b in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    wanted = _dense_attention(q, k, v, cu.tolist(), sinks, *options[1:])
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    exact = [wanted, *torch.autograd.grad(wanted, inputs, dout)]
    for a, b in zip([found[3000][0], *found[3000][2:]], exact, strict=False):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-4)
    long = torch.randn(1024, 4, 16)
    whole = torch.tensor([0, 1024], dtype=torch.int32)
    call = (long, long[:, :2], long[:, :2], whole, whole, None, None, True, 0, 0.25, 0.0)
    monkeypatch.setattr(varlen_attention, "PORTABLE_SCORES", 1 << 16)
    assert peak(lambda: varlen_attention.portable_varlen_attention(*call)) < 4 * MIB  # of 16 for the scores


def _dense_attention(q, k, v, boundaries, sinks, window, scale, softcap):
    """Document by document, row by row of a plain softmax."""
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    rows = []
    for i in range(q.shape[0]):
        begin = max([b for b in boundaries if b <= i])
        if begin == boundaries[-1]:
            rows.append(torch.zeros(4, 16))
            continue
        first = max(begin, i - window + 1) if window else begin
        scores = scale * torch.einsum("hd,khd->hk", q[i], keys[first : i + 1])
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], 1)
        weights = torch.softmax(scores, 1)[:, : i + 1 - first]
        rows.append(torch.einsum("hk,khd->hd", weights, values[first : i + 1]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_experts_hold_one_dense_expert(name):
    """16 bits and float32 of one expert, a panel and rows of slots: not a float of all experts."""
    experts, hidden, inner, tokens, top = 16, 512, 256, 32, 2
    first, second = packed(name, experts, 2 * inner, hidden), packed(name, experts, hidden, inner)
    ids = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) + 5) % experts], 1)
    weights = [(w.values, list(w.scales), w.layout) for w in (first, second)]
    call = (
        *(torch.randn(tokens, hidden).bfloat16(), ids, torch.rand(tokens, top)),
        *(*weights[0], None, *weights[1], None, None, None, None, None, 0.0, 0.0),
        *(0, False, 1.702, 7.0, False, True),
    )
    found = peak(lambda: portable_experts(*call))
    one, panel, rows = 2 * inner * hidden, 12 * 2 * inner * hidden, tokens * top * 4 * (hidden + 2 * inner)
    scales = sum(t.numel() for w in (first, second) for t in w.scales) * 8
    assert found <= 6 * one + panel + 4 * rows + scales
    assert found < 4 * experts * one  # float32 of the larger projection of all experts


def test_the_gated_delta_rule_grows_with_tokens_alone():
    """A state for each 64 tokens of one document, and nothing of tokens times tokens."""

    def held(tokens):
        q, k, v = (torch.randn(tokens, 2, 16) for _ in range(3))
        g, beta = -torch.rand(tokens, 2), torch.rand(tokens, 2)
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        call = (torch.randn(tokens, 2, 16), None, q, k, v, g, beta, cu, None, 0.25, True)
        return peak(lambda: portable_gated_delta_rule_backward(*call))

    assert held(2048) <= 4.2 * held(512)


def test_a_fused_step_keeps_packed_bytes_and_no_dense_weight(monkeypatch):
    """What Inductor sees on a device without kernels: aten operations, and for the backward packed bytes."""
    from functorch.compile import aot_function
    from torch._inductor.decomposition import select_decomp_table

    monkeypatch.setattr(decompositions, "stays_opaque", lambda *_: False)
    graphs, kept = [], []

    def compiled(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        if not kept:
            outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0][1:]
            kept.extend(node.meta["val"] for node in outputs if hasattr(node, "meta"))
        return make_boxed_func(graph.forward)

    first, second = packed("nf4", 256, 128), packed("fp8-block", 128, 256)

    def step(x, a, b, values, scales, values2, scales2):
        u = x @ a.t()
        y = torch.ops.monograph.linear(x, values, scales, first.layout, None, u, b, a)
        y = torch.nn.functional.silu(y)
        y = torch.ops.monograph.linear(y, values2, scales2, second.layout, None, None, None, None)
        return y.float().square().mean()

    x, a, b = (torch.randn(n, m).bfloat16().requires_grad_() for n, m in ((16, 128), (8, 128), (256, 8)))
    arguments = (x, a, b, first.values, list(first.scales), second.values, list(second.scales))
    partition = min_cut_rematerialization_partition
    table = dict(select_decomp_table())
    for name in decompositions.FUSED:
        table[getattr(torch.ops.monograph, name).default] = decompositions.unless_kernel(name)
    traced = aot_function(step, compiled, compiled, partition_fn=partition, decompositions=table)
    loss = traced(*arguments)
    grads = torch.autograd.grad(loss, (x, a, b))
    wanted = torch.autograd.grad(step(*arguments), (x, a, b))
    for got, want in zip(grads, wanted, strict=True):
        assert float((got - want).norm() / want.norm()) < 2**-6
    assert not any("monograph" in target for graph in graphs for target in graph)
    dense = {(256, 128), (128, 256), (256 * 128,)}
    assert {tuple(t.shape) for t in kept if t.dtype != torch.uint8 and tuple(t.shape) in dense} == set()
    assert sum(t.numel() for t in kept if t.dtype == torch.uint8) <= 256 * 128 * 2


def test_the_cpu_keeps_its_operators_under_inductor():
    """Inductor refuses to keep an operator that has an entry: without an accelerator there is none."""
    from torch._inductor.decomposition import decompositions as table

    for name in decompositions.FUSED:
        assert decompositions.unless_kernel(name)(torch.zeros(2)) is NotImplemented
        if not torch.accelerator.is_available():
            assert getattr(torch.ops.monograph, name).default not in table
