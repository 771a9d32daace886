"""linear_cross_entropy: accuracy against float64, gradients, the same bits in every batch, memory, misuse."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import monograph as mg
from monograph.bench.peak_memory import peak_bytes
from monograph.ops.linear_cross_entropy import (
    linear_cross_entropy,
    portable_linear_cross_entropy,
    portable_linear_cross_entropy_dw,
)
from support.loss_heads import DTYPES, HALF_ULP, float64_losses, head

per_isa = pytest.mark.per_isa


@per_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [None, "nf4", "fp4"])
@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (4.0, 0.5)])
def test_loss_and_gradients_against_float64(dtype, format, softcap, scale):
    for tokens, vocabulary, width in ((1, 2, 8), (7, 33, 64), (65, 1031, 96), (40, 257, 77)):
        x, weight, dense, bias, labels = head(tokens, vocabulary, width, dtype, format)
        g = torch.rand(tokens)
        leaves = [x, bias] if format else [x, bias, weight[0]]
        trained = leaves[:1] if format else leaves  # the bias of a packed weight is frozen
        for leaf in trained:
            leaf.requires_grad_()
        losses = linear_cross_entropy(x, *weight, labels, bias, softcap=softcap, scale=scale)
        grads = torch.autograd.grad(losses, trained, g)
        exact = [t.detach().double().requires_grad_() for t in (x, bias, dense)]
        want, z = float64_losses(exact[0], exact[2], exact[1], labels, softcap, scale)
        # A logit is rounded once, and its sum of `width` products to fp32 before; the loss has two of them.
        logit = (x.double().abs() @ dense.double().abs().t() + bias.abs()).max().detach()
        bound = 2 * scale * (HALF_ULP[dtype] * z.detach().abs().max() / scale + 2**-20 * logit) + 2**-20 * (
            8 + softcap
        )
        assert (losses - want).abs().max() <= bound
        want_grads = torch.autograd.grad(want, exact, g.double())
        eps = 2 * HALF_ULP[dtype] + bound.item()
        for got, index in zip(grads, (0, 1, 2), strict=False):
            difference = (got.double() - want_grads[index]).norm()
            assert difference <= eps * want_grads[index].norm() + 1e-30, (tokens, vocabulary, index)
        assert not grads[0][labels == -100].any()
        assert not losses[labels == -100].any()


@per_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [None, "nf4"])
def test_a_token_has_the_same_bits_in_every_batch_and_for_any_threads(dtype, format):
    x, weight, _, bias, labels = head(130, 515, 96, dtype, format)
    x.requires_grad_()

    def run(rows):
        part = x.detach()[rows].clone().requires_grad_()
        losses = linear_cross_entropy(part, *weight, labels[rows], bias)
        return losses.detach(), torch.autograd.grad(losses.sum(), part)[0]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(slice(None))
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (slice(None), slice(0, 1), slice(3, 20), slice(100, 130), torch.tensor([5, 5, 77])):
                got = run(rows)
                assert torch.equal(got[0], want[0][rows]), (threads, rows)
                assert torch.equal(got[1], want[1][rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinite_logits_are_those_of_torch(dtype):
    """The weight is the identity: x are the logits."""
    odd = (float("nan"), float("inf"), float("-inf"))
    for value in odd:
        for place in (0, 3, 19):
            x = torch.randn(1, 20).to(dtype)
            x[0, place] = value
            labels = torch.tensor([3])
            # The product 0 * inf of an identity would be NaN: the odd logit comes by the bias.
            bias, zeros = x[0].clone(), torch.zeros(1, 20, dtype=dtype).requires_grad_()
            weight = torch.eye(20, dtype=dtype)
            got = linear_cross_entropy(zeros, weight, [], [0, 0, 20, 20], labels, bias)
            logits = bias.float()[None].requires_grad_()
            want = F.cross_entropy(logits, labels, reduction="none")
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
            dx = torch.autograd.grad(got.sum(), zeros)[0]
            dlogits = torch.autograd.grad(want.sum(), logits)[0]
            tolerance = 4 * HALF_ULP[dtype] + 1e-6
            torch.testing.assert_close(dx.float(), dlogits, equal_nan=True, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_portable_implementation_agrees(dtype):
    for format in (None, "nf4"):
        x, weight, dense, bias, labels = head(50, 300, 64, dtype, format)
        arguments = (x, *weight, bias, labels, 5.0, 0.5)
        got = torch.ops.monograph.linear_cross_entropy(*arguments, True)
        want = portable_linear_cross_entropy(*arguments, True)
        # Logits differ by one rounding where the products were summed in another order.
        bound = 16 * HALF_ULP[dtype] + 2**-20
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= bound * b.abs().max()
        assert portable_linear_cross_entropy(*arguments, False)[2].numel() == 0
        g = torch.rand(50)
        got_dw = torch.ops.monograph.linear_cross_entropy_dw(x, dense, bias, labels, got[1], g, 5.0, 0.5)
        want_dw = portable_linear_cross_entropy_dw(x, dense, bias, labels, got[1], g, 5.0, 0.5)
        for a, b in zip(got_dw, want_dw, strict=True):
            assert (a - b).norm() <= bound * b.norm()


def test_no_label_counts_and_no_token():
    x, weight, _, bias, labels = head(9, 20, 16, torch.bfloat16)
    x.requires_grad_()
    losses = linear_cross_entropy(x, *weight, torch.full_like(labels, -100), bias)
    assert not losses.any()
    assert not torch.autograd.grad(losses.sum(), x)[0].any()
    assert linear_cross_entropy(x[:0], *weight, labels[:0], bias).shape == (0,)


def test_leading_dimensions_strides_and_eval():
    x, weight, _, bias, labels = head(12, 40, 32, torch.float32)
    want = linear_cross_entropy(x, *weight, labels, bias)
    assert torch.equal(
        linear_cross_entropy(x.reshape(3, 4, 32), *weight, labels.reshape(3, 4), bias), want.reshape(3, 4)
    )
    wide = torch.zeros(12, 50)
    wide[:, 5:37] = x
    assert torch.equal(linear_cross_entropy(wide[:, 5:37], *weight, labels, bias), want)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x.requires_grad_(), *weight, labels, bias), want)


@pytest.mark.parametrize("format", [None, "nf4"])
def test_opcheck(format):
    x, weight, dense, bias, labels = head(6, 24, 64, torch.bfloat16, format)
    x.requires_grad_()
    ops = torch.ops.monograph
    opcheck(ops.linear_cross_entropy, (x, *weight, None, labels, 0.0, 1.0, True))
    opcheck(ops.linear_cross_entropy, (x.detach(), *weight, bias, labels, 3.0, 0.5, False))
    if format is None:
        trained = (x, dense.requires_grad_(), [], weight[2], bias.requires_grad_(), labels, 0.0, 1.0, True)
        opcheck(ops.linear_cross_entropy, trained)
        opcheck(
            ops.linear_cross_entropy_dw,
            (x.detach(), dense.detach(), bias.detach(), labels, torch.rand(6), torch.rand(6), 0.0, 1.0),
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_over_lengths(backend):
    """fullgraph, dynamic tokens, loss and gradient those of eager; 1 graph for 4 lengths."""
    torch._dynamo.reset()
    _, weight, _, _, _ = head(1, 70, 32, torch.bfloat16, "nf4")
    graphs = []

    def counted(module, inputs):
        graphs.append(module)
        if backend == "aot_eager":
            from torch._dynamo.backends.debugging import aot_eager as compiler
        else:
            from torch._inductor.compile_fx import compile_fx as compiler
        return compiler(module, inputs)

    @torch.compile(fullgraph=True, backend=counted)
    def step(x, labels):
        return linear_cross_entropy(x * 2, *weight, labels).sum() / (labels != -100).sum()

    for tokens in (5, 17, 64, 33):
        x, _, _, _, labels = head(tokens, 70, 32, torch.bfloat16)
        x.requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(labels, 0)
        loss = step(x, labels)
        (dx,) = torch.autograd.grad(loss, x)
        want = linear_cross_entropy(x * 2, *weight, labels).sum() / (labels != -100).sum()
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
        # Compiled, the factors of backward may be rounded together.
        torch.testing.assert_close(dx, torch.autograd.grad(want, x)[0], rtol=2**-7, atol=0)
    assert len(graphs) == 1


def test_nothing_but_dx_is_saved_for_backward():
    x, weight, _, bias, labels = head(8, 200, 64, torch.bfloat16, "nf4")
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(x, *weight, labels, bias)
    assert [tuple(t.shape) for t in saved] == [(8, 64)]


def test_flops_and_autocast():
    x, weight, _, bias, labels = head(6, 24, 64, torch.float32, "nf4")
    x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(x, *weight, labels)
    assert counter.get_total_flops() == 2 * 2 * 6 * 24 * 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_cross_entropy(x, *weight, labels, bias)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, linear_cross_entropy(x.bfloat16(), *weight, labels, bias.bfloat16()))
    assert torch.autograd.grad(losses.sum(), x)[0].dtype == torch.float32


def test_peak_memory_of_a_large_vocabulary():
    """4096 tokens by 128,256: the logits would be 1 GiB in bf16, 2 GiB in fp32. 63 MiB of them exist.

    Besides them: dx and its product with g (fp32 and bf16), 4 bytes per label and per loss, the scratch of
    the products (6 MiB), 4 MiB for the process.
    """
    setup = """
from monograph.ops.linear_cross_entropy import linear_cross_entropy
x = torch.randn(4096, 64).bfloat16().requires_grad_()
weight = torch.randn(128256, 64).bfloat16()
labels = torch.randint(0, 128256, (4096,))
def step(x, weight, labels):
    loss = linear_cross_entropy(x, weight, [], [0, 0, *weight.shape], labels).mean()
    return torch.autograd.grad(loss, x)
step(x[:8], weight[:100], labels[:8] % 100)
"""
    peak = peak_bytes(setup, "step(x, weight, labels)", threads=1)
    assert peak <= (64 + 6 + 4) * 2**20 + 4096 * 64 * 8, f"{peak / 2**20:.0f} MiB"


def test_wrong_arguments_name_the_thing_found_and_wanted():
    x, weight, dense, bias, labels = head(6, 24, 64, torch.float32)
    cases = [
        ((x[:, :-1], *weight, labels), {}, "x has 63 columns, the weight has 64"),
        ((x, *weight, labels[:-1]), {}, "labels has 5 entries, x has 6 rows"),
        ((x, *weight, labels.int()), {}, "labels has dtype int32, wanted int64"),
        ((x, *weight, torch.full((6,), 24)), {}, "label 24 of token 0 .* vocabulary of 24; wanted 0 to 23"),
        ((x, *weight, torch.full((6,), -1)), {}, "label -1 of token 0 is not in the vocabulary"),
        ((x, *weight, labels, bias.bfloat16()), {}, "bias is bfloat16, wanted float32"),
        ((x, *weight, labels), {"softcap": -1.0}, "softcap is -1, wanted 0 for none or more"),
        ((x, *weight, labels), {"scale": 0.0}, "scale is 0, wanted more than 0"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(RuntimeError, match=message):
            linear_cross_entropy(*arguments, **options)
    packed = mg.quantize(dense)
    losses = linear_cross_entropy(
        x, packed.values, list(packed.scales), packed.layout, labels, bias.requires_grad_()
    )
    with pytest.raises(RuntimeError, match="the bias of a packed weight cannot be trained"):
        losses.sum().backward()
