"""Weights whose columns are sorted by group (GPTQ's act-order): products, gradients, one graph."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import monograph as mg
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.hf.transformers.expert_loading import stack
from monograph.nn import PackedExperts, QuantLinear
from monograph.ops.layout import plain_layout
from monograph.ops.linear import linear as linear_op
from monograph.ops.linear import linear_dx
from monograph.quant.packed_weight import linear_shared
from monograph.quant.quant_methods.compressed_tensors import CompressedTensors
from monograph.quant.quant_methods.monograph_columns import MonographColumns
from monograph.quant.sorted_columns import inverse_of, permuted
from monograph.training.loss import token_losses
from support.word_folders import Words, sorted_rows, word_weight

CASES = {
    "v1": Words(group=32, act_order=True),
    "v2": Words(group=32, act_order=True, settings={"checkpoint_format": "gptq_v2"}),
    "symmetric": Words(group=64, act_order=True, symmetric=True),
    "8-bits": Words(bits=8, group=32, act_order=True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_of(words, shape=(136, 512), seed=0, dtype=torch.bfloat16):
    """(packed, values in fp32 in the order of the model)."""
    parts, dense = word_weight(words, shape, np.random.default_rng(seed))
    packed = MonographColumns().pack(sorted_rows(parts, words), dtype)
    assert packed.columns is not None
    return packed, dense


def bits(tensor):
    kinds = {2: torch.int16, 4: torch.int32}
    return tensor.detach().contiguous().view(kinds[tensor.element_size()])


def product_of_sorted(x, packed, bias=None):
    """x[:, columns] times the sorted decoded weight, by the same kernel on plain values."""
    decoded = packed.stored.dequantize(x.dtype)
    return linear_op(x[..., packed.columns.long()], decoded, [], plain_layout(decoded.shape), bias)


@pytest.mark.parametrize("case", CASES)
def test_values_have_the_order_of_the_model(case):
    packed, dense = weight_of(CASES[case])
    assert torch.equal(packed.dequantize(torch.float32), dense)
    assert torch.equal(packed.stored.dequantize(torch.float32), dense[:, packed.columns.long()])
    out = torch.empty_like(dense)
    assert packed.dequantize(torch.float32, out) is out
    assert torch.equal(out, dense)
    assert torch.equal(packed.t().dequantize(torch.float32), dense.t())
    assert torch.equal(packed.slice_rows(8, 24).dequantize(torch.float32), dense[8:32])
    assert torch.equal(QuantLinear(packed).weight + 0, dense.bfloat16())
    assert "columns sorted by group" in repr(packed)
    again = MonographColumns().unpack(packed)
    assert torch.equal(MonographColumns().pack(again, torch.float32).dequantize(), dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_products_have_the_bits_of_the_sorted_weight(case, dtype):
    packed, dense = weight_of(CASES[case], dtype=dtype)
    bias = torch.randn(136, generator=torch.Generator().manual_seed(2)).to(dtype)
    for rows in (1, 3, 70):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(dtype).requires_grad_()
        dy = torch.randn(rows, 136, generator=torch.Generator().manual_seed(9)).to(dtype)
        dy[0, :7] = 0.0
        y = mg.linear(x, packed, bias)
        y.backward(dy)
        assert torch.equal(bits(y), bits(product_of_sorted(x.detach(), packed, bias)))
        decoded = packed.stored.dequantize(dtype)
        scattered = torch.empty_like(dy[:, :1].expand(rows, 512)).contiguous()
        scattered[:, packed.columns.long()] = linear_dx(dy, decoded, [], plain_layout(decoded.shape))
        assert torch.equal(bits(x.grad), bits(scattered))
        # Sums of the same 512 (136) products in two orders, in fp32, each rounded once to dtype.
        unit = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        wide, weight = x.detach().double(), dense.to(dtype).double()
        exact = wide @ weight.t() + bias.double()
        size = wide.abs() @ weight.abs().t() + bias.abs().double()
        assert ((y.double() - exact).abs() <= 514 * 2**-24 * size + unit * (1.01 * size)).all()
        size = dy.double().abs() @ weight.abs()
        assert ((x.grad.double() - dy.double() @ weight).abs() <= (138 * 2**-24 + 1.01 * unit) * size).all()


def test_a_gradient_keeps_the_sign_of_zero_and_is_differentiable_again():
    columns = torch.randperm(16, generator=torch.Generator().manual_seed(0)).int()
    assert torch.equal(inverse_of(columns)[columns.long()], torch.arange(16, dtype=torch.int32))
    x = torch.randn(3, 16, requires_grad=True)
    dy = torch.full((3, 16), -0.0)
    (dx,) = torch.autograd.grad(permuted(x, columns), x, dy)
    assert torch.signbit(dx).all()
    wide = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: permuted(t, columns), wide)
    assert torch.autograd.gradgradcheck(lambda t: permuted(t, columns) ** 2, wide)


class Decoded(QuantLinear):
    """The same layer on its decoded values, in the order in which they are stored."""

    @property
    def operands(self):
        stored = self.packed.stored.dequantize(self.weight_dtype)
        return stored, [], plain_layout(stored.shape)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, torch.bfloat16), ({"lora_dropout": 0.5}, torch.bfloat16), ({"use_dora": True}, torch.float32)],
    ids=str,
)
def test_lora_gradients_have_the_bits_of_the_decoded_base(options, dtype):
    packed, _ = weight_of(CASES["v1"], (64, 128), dtype=dtype)
    grads = []
    for kind in (QuantLinear, Decoded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 64, dtype=dtype))
        model[0] = kind(packed, model[0].bias)
        config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, **options)
        peft = get_peft_model(model, config)
        layer = peft.base_model.model[0]
        LoraLinear.take_over(layer)
        assert type(layer.base_layer) is kind
        x = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        torch.manual_seed(3)
        y = peft(x)
        y.float().square().sum().backward()
        trained = {name: p.grad for name, p in peft.named_parameters() if p.requires_grad}
        grads.append([y, x.grad, *trained.values()])
        assert len(trained) == (3 if "use_dora" in options else 2)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*grads, strict=True))


def test_lora_sees_x_in_the_order_of_the_model():
    """Against PEFT's own formula on a dense layer, in fp32."""
    packed, dense = weight_of(CASES["v2"], (64, 128), dtype=torch.float32)
    results = []
    for base in (QuantLinear(packed), nn.Linear(128, 64, bias=False)):
        if type(base) is nn.Linear:
            base.weight.data = dense.clone()
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=3, target_modules=["0"], init_lora_weights=False)
        peft = get_peft_model(nn.Sequential(base), config)
        if isinstance(base, QuantLinear):
            LoraLinear.take_over(peft.base_model.model[0])
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = peft(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in peft.parameters() if p.requires_grad)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("dora", [False, True])
def test_a_merge_has_the_order_of_the_model(dora):
    packed, dense = weight_of(CASES["v1"], (64, 128), dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False, use_dora=dora)
    peft = get_peft_model(nn.Sequential(QuantLinear(packed)), config)
    layer = peft.base_model.model[0]
    a, b = layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()
    want = dense.double() + (b.double() @ a.double()) * layer.scaling["default"]
    if dora:
        size = layer.lora_magnitude_vector["default"].weight.detach().double()
        want *= (size / want.norm(dim=1))[:, None]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(5))
    before = peft(x)
    layer.merge()
    assert torch.equal(layer.base_layer.weight, want.float())
    assert torch.allclose(peft(x), before, atol=1e-4)
    layer.unmerge()
    assert torch.equal(layer.base_layer.packed.columns, packed.columns)
    assert torch.equal(bits(peft(x)), bits(before))


@pytest.mark.parametrize("equal", [True, False])
def test_shared_products_are_shared_where_columns_are_equal(equal, monkeypatch):
    weights = [weight_of(CASES["v1"], (64, 128), seed)[0] for seed in (0, 1, 2)]
    assert torch.equal(weights[0].columns, weights[1].columns)
    if equal:
        weights[1] = replace(weights[1], columns=weights[1].columns.clone())
    else:
        parts = torch.randperm(128, generator=torch.Generator().manual_seed(4)).int()
        weights[1] = replace(weights[1], columns=parts)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        together = linear_shared(x, weights)
    assert calls.count("linear_shared.default") == int(equal)
    assert calls.count("linear.default") == (0 if equal else 3)
    single = [mg.linear(x, weight) for weight in weights]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(together, single, strict=True))
    dys = [torch.randn(5, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    (one,) = torch.autograd.grad(together, x, dys)
    (other,) = torch.autograd.grad(single, x, dys)
    assert (one - other).float().norm() <= 2**-7 * other.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_without_a_copy_of_the_weight(backend):
    packed, _ = weight_of(CASES["v1"], (64, 128))
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
    peft = get_peft_model(nn.Sequential(QuantLinear(packed, torch.randn(64).bfloat16())), config)
    LoraLinear.take_over(peft.base_model.model[0])
    compiled = torch.compile(peft, backend=backend, fullgraph=True)
    found = []
    for model in (peft, compiled):
        x = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        model.zero_grad()
        y = model(x)
        y.float().square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in peft.parameters() if p.requires_grad)])
    for eager, graph in zip(*found, strict=True):
        assert torch.equal(bits(eager), bits(graph))


def test_operators_pass_opcheck_on_the_stored_weight():
    packed, _ = weight_of(CASES["8-bits"], (64, 128))
    stored = packed.stored
    x = permuted(torch.randn(3, 128), packed.columns).requires_grad_()
    torch.library.opcheck(
        torch.ops.monograph.linear.default,
        (x, stored.values, list(stored.scales), stored.layout, None, None, None, None),
    )


def test_a_head_is_read_in_the_order_of_the_model():
    packed, dense = weight_of(CASES["v1"], (64, 128), dtype=torch.float32)
    hidden = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.randint(0, 64, (2, 5), generator=torch.Generator().manual_seed(2))
    found = []
    for head in (QuantLinear(packed), nn.Linear(128, 64, bias=False)):
        if type(head) is nn.Linear:
            head.weight = nn.Parameter(dense.clone(), requires_grad=False)
        losses = token_losses(hidden, head, labels)
        found.append((losses, *torch.autograd.grad(losses.sum(), hidden)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_who_does_not_know_columns_is_told():
    packed, _ = weight_of(CASES["v1"], (64, 128))
    layer = QuantLinear(packed)
    for who in (packed, layer):
        with pytest.raises(ValueError, match=r"columns sorted by group.*wanted weight.stored"):
            mg.ops.linear(torch.randn(1, 128), packed.values, list(packed.scales), who.layout)
    with pytest.raises(ValueError, match=r"columns sorted by group.*no PiSSA, no LoftQ"):
        layer.requantize(layer.dequantize())
    with pytest.raises(ValueError, match="columns sorted by group"):
        layer.put(packed)
    with pytest.raises(ValueError, match=r"columns sorted by group.*compressed-tensors has no name for"):
        CompressedTensors().unpack(packed)
    with pytest.raises(ValueError, match=r"columns sorted by group.*act-order is for linear layers"):
        stack([[packed], [packed]])
    with pytest.raises(ValueError, match="columns sorted by group"):
        PackedExperts().put_packed("down_proj", packed)
    peft = nn.Sequential(layer)
    with pytest.raises(ValueError, match="no PiSSA"):
        get_peft_model(peft, LoraConfig(r=4, target_modules=["0"], init_lora_weights="pissa"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(weight_columns=t["weight_columns"].long()),
            r"int64 \[128\], wanted int32",
        ),
        (lambda t: t.update(weight_columns=t["weight_columns"][1:]), r"int32 \[127\], wanted int32 \[128\]"),
        (lambda t: t["weight_columns"].__setitem__(3, -1), "no permutation, wanted each of 0 to 127 once"),
        (lambda t: t["weight_columns"].__setitem__(3, 128), "no permutation, wanted each of 0 to 127 once"),
        (lambda t: t["weight_columns"].__setitem__(3, t["weight_columns"][4]), "no permutation"),
        (lambda t: t.pop("weight_columns"), "wanted weight_columns beside each packed weight"),
    ],
)
def test_columns_that_are_none_are_refused(change, message):
    parts, _ = word_weight(CASES["v1"], (64, 128), np.random.default_rng(0))
    rows = sorted_rows(parts, CASES["v1"])
    with pytest.raises(ValueError, match="there is a weight_columns, and quant_method is 'comp"):
        CompressedTensors().pack(rows, torch.bfloat16)
    change(rows)
    with pytest.raises(ValueError, match=message):
        MonographColumns().pack(rows, torch.bfloat16)


def test_columns_in_order_cost_nothing():
    words = Words(group=32)
    parts, dense = word_weight(words, (64, 128), np.random.default_rng(0))
    packed = MonographColumns().pack(sorted_rows(parts, words), torch.float32)
    assert packed.columns is None
    assert torch.equal(packed.dequantize(), dense)
    again = MonographColumns().unpack(packed)["weight_columns"]
    assert torch.equal(again, torch.arange(128, dtype=torch.int32))
