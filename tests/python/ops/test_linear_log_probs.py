"""linear_log_probs: against float64, gradients of log-probabilities and entropy, batches, graphs, misuse."""

import pytest
import torch
from torch.library import opcheck

from monograph.ops.linear_log_probs import (
    linear_log_probs,
    portable_linear_entropy_dx,
    portable_linear_log_probs,
)
from support.loss_heads import DTYPES, HALF_ULP, float64_losses, head

per_isa = pytest.mark.per_isa


def in_float64(x, dense, bias, labels, softcap, scale):
    """log_probs, entropy, log sum p^2, mean and top, by their definitions."""
    loss, z = float64_losses(x, dense, bias, labels, softcap, scale)
    log_p = z.log_softmax(1)
    p = log_p.exp()
    counts = labels != -100
    statistics = (-(p * log_p).sum(1), p.square().sum(1).log(), z.mean(1))
    return -loss, *(torch.where(counts, s, 0.0) for s in statistics), (z.argmax(1) == labels) & counts, z


@per_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [None, "nf4"])
@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 1.0), (4.0, 0.5)])
def test_values_and_gradients_against_float64(dtype, format, softcap, scale):
    for tokens, vocabulary, width in ((1, 2, 8), (7, 33, 64), (65, 1031, 96), (40, 257, 77)):
        x, weight, dense, bias, labels = head(tokens, vocabulary, width, dtype, format)
        x.requires_grad_()
        exact = x.detach().double().requires_grad_()
        *want, z = in_float64(exact, dense.double(), bias.double(), labels, softcap, scale)
        got = linear_log_probs(x, *weight, labels, bias, softcap=softcap, scale=scale)
        # A logit is rounded once, and its sum of `width` products to fp32 before.
        logit = (x.double().abs() @ dense.double().abs().t() + bias.abs()).max().detach()
        largest = z.detach().abs().max()
        z_error = scale * (HALF_ULP[dtype] * largest / scale + 2**-20 * logit) + 2**-20 * (4 + softcap)
        # Of log p twice that; p log p moves by |dlog p| (1 + |log p|) at most, summed with weights p.
        spread = 1 + 2 * largest + torch.tensor(vocabulary).log()
        for name, error in (
            ("log_probs", 2 * z_error),
            ("entropy", 2 * z_error * spread),
            ("log_sum_sq_probs", 4 * z_error),
            ("mean_logits", z_error),
        ):
            index = got._fields.index(name)
            assert (got[index] - want[index]).abs().max() <= error + 2**-20 * spread, (name, tokens)
        two = z.detach().topk(2, dim=1).values
        clear = (two[:, 0] - two[:, 1]) > 2 * z_error  # rounding may exchange what is closer
        assert torch.equal(got.is_top1[clear], want[4][clear])
        assert not any(each[labels == -100].any() for each in got)

        g, h = torch.rand(tokens), torch.rand(tokens)
        for gradients in ((g, None), (None, h), (g, h)):
            pairs = zip(got[:2], want[:2], gradients, strict=True)
            outputs = [pair for pair in pairs if pair[2] is not None]
            ours = torch.autograd.grad(
                [o for o, _, _ in outputs], x, [e for _, _, e in outputs], retain_graph=True
            )[0]
            reference = torch.autograd.grad(
                [w for _, w, _ in outputs], exact, [e.double() for _, _, e in outputs], retain_graph=True
            )[0]
            eps = 4 * HALF_ULP[dtype] + 4 * float(z_error * spread)
            assert (ours.double() - reference).norm() <= eps * reference.norm() + 1e-6, (tokens, gradients)
            assert not ours[labels == -100].any()


def test_the_first_of_equal_logits_is_the_top():
    weight = torch.zeros(5, 4)
    weight[1:4, 0] = 1.0  # 1, 2 and 3 are equal
    x = torch.ones(4, 4)
    labels = torch.tensor([0, 1, 2, 3])
    found = linear_log_probs(x, weight, [], [0, 0, 5, 4], labels)
    assert found.is_top1.tolist() == [False, True, False, False]


def test_nothing_is_the_top_of_nan():
    x, weight, labels = torch.ones(2, 8), torch.ones(1, 8), torch.tensor([0, 0])
    x[1, 3] = float("nan")
    for function in (torch.ops.monograph.linear_log_probs, portable_linear_log_probs):
        top = function(x, weight, [], [0, 0, 1, 8], None, labels, 0.0, 1.0, False)[4]
        assert top.tolist() == [True, False]


@per_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch(dtype):
    x, weight, _, bias, labels = head(130, 515, 96, dtype, "nf4")
    whole = linear_log_probs(x, *weight, labels, bias)
    for begin, end in ((0, 1), (3, 20), (100, 130)):
        some = linear_log_probs(x[begin:end], *weight, labels[begin:end], bias)
        for all_tokens, few in zip(whole, some, strict=True):
            assert torch.equal(all_tokens[begin:end], few)


@pytest.mark.parametrize("format", [None, "nf4"])
def test_opcheck_and_the_portable_implementation(format):
    x, weight, _, bias, labels = head(9, 65, 64, torch.float32, format)
    x.requires_grad_()
    arguments = (x, *weight, bias, labels, 3.0, 0.5, True)
    opcheck(torch.ops.monograph.linear_log_probs, arguments)
    got = torch.ops.monograph.linear_log_probs(*arguments)
    for ours, portable in zip(got, portable_linear_log_probs(*arguments), strict=True):
        torch.testing.assert_close(ours, portable, rtol=1e-5, atol=1e-5)
    sums, entropy, g = got[5].detach(), got[1].detach(), torch.rand(9)
    backward = (x.detach(), *weight, bias, labels, sums, entropy, g, 3.0, 0.5)
    opcheck(torch.ops.monograph.linear_entropy_dx, backward)
    torch.testing.assert_close(
        torch.ops.monograph.linear_entropy_dx(*backward),
        portable_linear_entropy_dx(*backward),
        rtol=1e-4,
        atol=1e-6,
    )


def test_one_graph_with_dynamic_lengths():
    torch._dynamo.reset()
    _, weight, _, bias, _ = head(1, 65, 64, torch.float32, "nf4")

    @torch.compile(fullgraph=True, dynamic=True)
    def loss(x, labels):
        found = linear_log_probs(x, *weight, labels, bias)
        return -found.log_probs.sum() + 0.1 * found.entropy.sum() + found.is_top1.sum()

    for tokens in (5, 17, 33):
        x, _, _, _, labels = head(tokens, 65, 64, torch.float32, seed=tokens)
        compiled, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss(compiled, labels).backward()
        loss._torchdynamo_orig_callable(eager, labels).backward()
        torch.testing.assert_close(compiled.grad, eager.grad)


def test_a_trained_head_gets_its_gradient():
    x, weight, dense, bias, labels = head(20, 33, 16, torch.float32)
    for leaf in (x, weight[0], bias):
        leaf.requires_grad_()
    g = torch.rand(20)
    found = linear_log_probs(x, *weight, labels, bias)
    exact = [t.detach().double().requires_grad_() for t in (x, dense, bias)]
    want = in_float64(exact[0], exact[1], exact[2], labels, 0.0, 1.0)
    for index in (0, 1):
        ours = torch.autograd.grad(found[index], (x, weight[0], bias), g, retain_graph=True)
        reference = torch.autograd.grad(want[index], exact, g.double(), retain_graph=True)
        for got, expected in zip(ours, reference, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_misuse_is_named():
    x, weight, _, _, labels = head(4, 33, 16, torch.float32)
    with pytest.raises(RuntimeError, match="linear_log_probs: labels has dtype int32, wanted int64"):
        linear_log_probs(x, *weight, labels.int())
    with pytest.raises(RuntimeError, match="label 33 of token 0 is not in the vocabulary of 33"):
        linear_log_probs(x, *weight, torch.full((4,), 33))
