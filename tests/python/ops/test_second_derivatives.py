"""Second derivatives are right where they are promised (linear and what is made of it), else they raise."""

import pytest
import torch

import monograph as mg
from monograph.ops.linear import linear, plain_linear
from monograph.ops.linear_shared import linear_shared
from support.lora_pairs import CASES, pair

OPS = torch.ops.monograph


def twice(loss_of, leaves):
    """The gradient of a penalty on the gradient, and the gradient itself."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    first = torch.autograd.grad(loss_of(**leaves), list(leaves.values()), create_graph=True)
    penalty = sum(g.pow(2).sum() for g in first)
    second = torch.autograd.grad(penalty, list(leaves.values()))
    return dict(zip(leaves, zip(first, second, strict=True), strict=True))


def assert_agree(ours, exact, limit=2**-16):
    for name, pairs in exact.items():
        for order, got, want in zip(("first", "second"), ours[name], pairs, strict=True):
            assert want.norm() > 0
            assert (got.double() - want).norm() <= limit * want.norm(), (name, order)


def leaves_of(*names):
    torch.manual_seed(1)
    shapes = {"x": (2, 3, 64), "bias": (24,), "b": (24, 4), "a": (4, 64), "u": (2, 3, 4), "w": (24, 64)}
    return {name: 0.3 * torch.randn(shapes[name]) for name in names}


def loss(y):
    return torch.tanh(y).sin().sum()


@pytest.mark.parametrize("fused", [False, True])
def test_linear_in_all_its_arguments(fused):
    """u = x a^T is handed over computed: its part in db = dy^T u counts too."""
    w = mg.quantize(torch.randn(24, 64) * 0.2)
    dense = w.dequantize(torch.float32).double()

    def ours(x, bias, b, a=None, u=None):
        u = plain_linear(x, a).detach() if fused else u
        return loss(linear(x, w.values, list(w.scales), w.layout, bias, u, b, a))

    def exact(x, bias, b, a=None, u=None):
        return loss(x @ dense.t() + (x @ a.t() if fused else u) @ b.t() + bias)

    leaves = leaves_of("x", "bias", "b", "a" if fused else "u")
    assert_agree(twice(ours, leaves), twice(exact, {n: t.double() for n, t in leaves.items()}))


def test_a_trained_plain_weight():
    leaves = leaves_of("x", "w")
    ours = twice(lambda x, w: loss(plain_linear(x, w)), leaves)
    assert_agree(ours, twice(lambda x, w: loss(x @ w.t()), {n: t.double() for n, t in leaves.items()}))


@pytest.mark.parametrize("fused", [False, True])
def test_linear_shared(fused):
    w = mg.quantize(torch.randn(24, 64) * 0.2)
    dense = w.dequantize(torch.float32).double()
    packed = (list(w.scales), [])

    def ours(x, b, w_plain, a=None, u=None):
        u = plain_linear(x, a).detach() if fused else u
        values, layouts = [w.values, w_plain], [w.layout, [0, 0, 24, 64]]
        outputs = linear_shared(x, values, packed, layouts, (), [u, u], [b, b], [a, a] if fused else ())
        return loss(outputs[0]) + loss(2 * outputs[1])

    def exact(x, b, w_plain, a=None, u=None):
        low = (x @ a.t() if fused else u) @ b.t()
        return loss(x @ dense.t() + low) + loss(2 * (x @ w_plain.t() + low))

    leaves = leaves_of("x", "b", "a" if fused else "u")
    leaves["w_plain"] = leaves_of("w")["w"]
    assert_agree(twice(ours, leaves), twice(exact, {n: t.double() for n, t in leaves.items()}))


@pytest.mark.parametrize("case", ["lora", "dora"])
def test_a_gradient_penalty_after_optimize_is_pefts(case):
    """285.8 before and 225.6 after on one model: u was computed without a graph."""
    found = []
    for model in pair(**CASES[case]):
        x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).requires_grad_()
        leaves = [x, *(p for n, p in model.named_parameters() if "lora_" in n)]
        first = torch.autograd.grad(model(x).pow(2).sum(), leaves, create_graph=True)
        penalty = sum(g.pow(2).sum() for g in first)
        found.append(torch.autograd.grad(penalty, leaves))
    for peft_gradient, ours in zip(*found, strict=True):
        assert peft_gradient.norm() > 0
        assert (peft_gradient - ours).norm() <= 2e-4 * peft_gradient.norm()


def attention(q):
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    return mg.ops.varlen_attention.varlen_attention(q, q[:, :1], q[:, :1] + 1, cu)


def head(name, trained):
    def call(x):
        labels = torch.arange(9).reshape(3, 3)
        module = getattr(mg.ops, name)
        weight = torch.ones(10, 8, requires_grad=trained)
        result = getattr(module, name)(x, weight, [], [0, 0, 10, 8], labels)
        return result if isinstance(result, torch.Tensor) else result.log_probs + result.entropy

    return call


ONCE = {
    "varlen_attention_backward": (attention, (9, 2, 8)),
    "linear_cross_entropy": (head("linear_cross_entropy", trained=False), (3, 3, 8)),
    "linear_cross_entropy_dw|linear_cross_entropy": (head("linear_cross_entropy", trained=True), (3, 3, 8)),
    "linear_log_probs|linear_entropy_dx": (head("linear_log_probs", trained=False), (3, 3, 8)),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_is_not_differentiable_twice_raises(name):
    function, shape = ONCE[name]
    x = torch.randn(shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(gradient, plain)
    with pytest.raises(RuntimeError, match=f"({name}).*(second derivative|differentiated)"):
        torch.autograd.grad(gradient.pow(2).sum(), x)


def test_a_frozen_a_has_no_second_derivative():
    w = mg.quantize(torch.randn(24, 64))
    leaves = {name: t.requires_grad_(name != "a") for name, t in leaves_of("x", "a", "b").items()}
    x, a, b = leaves["x"], leaves["a"], leaves["b"]
    y = linear(x, w.values, list(w.scales), w.layout, None, plain_linear(x, a).detach(), b, a)
    with pytest.raises(RuntimeError, match="linear: no second derivative with a frozen `a`"):
        torch.autograd.grad(y.sum(), [x, b], create_graph=True)


def test_forward_mode_raises_and_never_gives_zero():
    w = mg.quantize(torch.randn(24, 64))
    packed = (w.values, list(w.scales), w.layout)
    functions = {
        "linear": (lambda x: linear(x, *packed), (3, 64)),
        "linear_dx": (lambda x: OPS.linear_dx(x, *packed, None, None), (3, 24)),
        "linear_shared": (lambda x: linear_shared(x, [w.values], [list(w.scales)], [w.layout])[0], (3, 64)),
        "varlen_attention": (attention, (9, 2, 8)),
        "linear_cross_entropy": (head("linear_cross_entropy", trained=False), (3, 3, 8)),
        "linear_log_probs": (head("linear_log_probs", trained=False), (3, 3, 8)),
        "seeded_dropout": (lambda x: OPS.seeded_dropout(x, torch.tensor(1), 0, 0.5), (4,)),
        "seeded_dropout_part": (lambda x: OPS.seeded_dropout_part(x, torch.tensor(1), 0, 0.5, 3), (4,)),
        "seeded_dropout_many": (
            lambda x: OPS.seeded_dropout_many(
                x, torch.tensor([0, 1, 3]), torch.tensor([1, 2]), [1], [0], [0.5]
            ),
            (3, 4),
        ),
    }
    for name, (function, shape) in functions.items():
        x = torch.randn(shape)
        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode differentiation"):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=f"{name}: forward-mode differentiation"):
                function(dual)
            function(x)  # no tangent, no objection


def test_nothing_more_is_kept_for_the_first_derivative():
    """The tensors that a fused call keeps: x, u, b, a and the packed bytes, as before."""
    w = mg.quantize(torch.randn(24, 64))
    leaves = {name: t.requires_grad_() for name, t in leaves_of("x", "a", "b").items()}
    u = plain_linear(leaves["x"], leaves["a"]).detach()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        linear(leaves["x"], w.values, list(w.scales), w.layout, None, u, leaves["b"], leaves["a"])
    assert set(kept) == {t.data_ptr() for t in (*leaves.values(), u, w.values, *w.scales)}
