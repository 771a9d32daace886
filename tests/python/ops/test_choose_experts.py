"""choose_experts: the routers of transformers, ties, its gradient, one graph and misuse."""

import pytest
import torch
from torch.library import opcheck

from monograph.ops.choose_experts import (
    choose_experts,
    portable_choose_experts,
    portable_choose_experts_backward,
)


def draw(tokens: int = 17, experts: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return (2 * torch.randn(tokens, experts)).to(dtype)


def wanted(logits: torch.Tensor, slots: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers' routers, in float64."""
    weights, ids = logits.double().softmax(-1).topk(slots, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalise else weights), ids


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("slots", [1, 4, 12])
def test_the_largest_and_their_shares(slots: int, normalise: bool) -> None:
    logits = draw()
    weights, ids = choose_experts(logits, slots, normalise=normalise)
    want, want_ids = wanted(logits, slots, normalise)
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights, want.float())
    half = logits.bfloat16()
    assert torch.equal(
        choose_experts(half, slots, normalise=normalise)[0],
        wanted(half, slots, normalise)[0].float().bfloat16(),
    )


@pytest.mark.parametrize("normalise", [False, True])
def test_the_gradient_is_that_of_transformers(normalise: bool) -> None:
    logits = draw().requires_grad_()
    given = torch.randn(17, 4)
    weights, _ = choose_experts(logits, 4, normalise=normalise)
    (got,) = torch.autograd.grad(weights, logits, given)
    wide = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(wanted(wide, 4, normalise)[0], wide, given.double())
    torch.testing.assert_close(got.double(), want, rtol=2**-22, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_portable_implementation(dtype: torch.dtype, normalise: bool) -> None:
    logits = draw(dtype=dtype)
    logits[3] = logits[3, 0]  # ties
    got, want = (
        f(logits, 5, normalise) for f in (torch.ops.monograph.choose_experts, portable_choose_experts)
    )
    assert torch.equal(got[1], want[1])
    assert got[1][3].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(got[0], want[0], rtol=torch.finfo(dtype).eps, atol=0)
    given = torch.randn(17, 5).to(dtype)
    gradients = [
        f(given, logits, got[1], normalise)
        for f in (torch.ops.monograph.choose_experts_backward, portable_choose_experts_backward)
    ]
    torch.testing.assert_close(*gradients, rtol=torch.finfo(dtype).eps, atol=1e-9)


def test_opcheck_and_one_graph() -> None:
    logits = draw().requires_grad_()
    opcheck(torch.ops.monograph.choose_experts, (logits, 3, True))

    def step(x: torch.Tensor) -> torch.Tensor:
        weights, ids = choose_experts(x, 3, normalise=True)
        return (weights * ids).sum()

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(got, step(logits))


def test_misuse() -> None:
    logits, ids = draw(), torch.zeros(17, 3, dtype=torch.int64)
    for call, words in (
        (lambda: choose_experts(logits, 0, normalise=True), "choose_experts: slots is 0, wanted 1 to the"),
        (lambda: choose_experts(logits, 13, normalise=True), "slots is 13, wanted 1 to the experts, 12"),
        (lambda: choose_experts(logits[0], 1, normalise=True), "logits has 1 dimensions, wanted 2"),
        (lambda: choose_experts(logits.long(), 1, normalise=True), "choose_experts: logits"),
        (
            lambda: torch.ops.monograph.choose_experts_backward(logits[:, :3], logits, ids.int(), True),
            "ids has dtype int32, wanted int64",
        ),
        (
            lambda: torch.ops.monograph.choose_experts_backward(logits[:, :2], logits, ids, True),
            "choose_experts_backward: dweights",
        ),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            call()
    x = logits.requires_grad_()
    (first,) = torch.autograd.grad(
        choose_experts(x, 2, normalise=True)[0].square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()
