"""PEFT's LoRA on QuantLinear: the fused layer against PEFT's own arithmetic on the dequantised model."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

import monograph as mg
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.nn import QuantLinear, replace_linears
from support.lora_pairs import CASES, Block, pair


def gradients(model, x):
    x = x.clone().requires_grad_(True)
    y = model(x)
    y.pow(2).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if "lora_" in name}
    assert found
    assert all(g is not None for g in found.values())
    return {"y": y.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_every_gradient_are_pefts(case):
    peft_model, ours = pair(**CASES[case])
    assert isinstance(ours.base_model.model.up, LoraLinear)
    x = torch.randn(7, 96)
    want, got = gradients(peft_model, x), gradients(ours, x)
    assert want.keys() == got.keys()
    for name in want:
        # float32 sums of at most 160 terms in another order: far below 160 * 2^-24 of the norm.
        assert (got[name] - want[name]).norm() <= 160 * 2**-24 * want[name].norm(), name


@pytest.mark.parametrize("case", ["lora", "dora"])
def test_bfloat16_stays_within_its_rounding(case):
    peft_model, ours = pair(torch.bfloat16, **CASES[case])
    assert next(p for n, p in ours.named_parameters() if "lora_A" in n).dtype == torch.float32
    x = torch.randn(7, 96, dtype=torch.bfloat16)
    reference, _ = pair(torch.float32, **CASES[case])
    want = gradients(reference, x.float())
    got, peft = gradients(ours, x), gradients(peft_model, x)
    for name in want:
        error = (got[name].float() - want[name]).norm() / want[name].norm()
        bound = (peft[name].float() - want[name]).norm() / want[name].norm() + 4 * 2**-8
        assert error <= bound, name


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_has_pefts_expectation_and_its_own_gradient(dora):
    _, ours = pair(r=8, lora_dropout=0.5, use_dora=dora)
    x = torch.randn(3, 96)
    ours.eval()
    without = ours.base_model.model.up(x)
    ours.train()
    torch.manual_seed(1)
    mean = torch.stack([ours.base_model.model.up(x) for _ in range(4000)]).mean(0)
    assert (mean - without).norm() <= 0.03 * without.norm()
    layer = ours.base_model.model.up
    a = layer.lora_A["default"].weight
    direction = torch.randn_like(a)

    def loss(shift):
        torch.manual_seed(2)
        with torch.no_grad():
            a.add_(direction, alpha=shift)
            value = layer(x).double().pow(2).sum()
            a.sub_(direction, alpha=shift)
        return value

    torch.manual_seed(2)
    (gradient,) = torch.autograd.grad(layer(x).pow(2).sum(), [a])
    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    if not dora:  # DoRA's norm counts as a constant in its gradient, so a difference quotient sees more
        assert abs((gradient * direction).sum() - slope) <= 1e-3 * abs(slope)
    assert gradient.isfinite().all()
    assert gradient.norm() > 0


@pytest.mark.parametrize("case", ["lora", "dora"])
def test_a_row_has_the_same_bits_at_any_batch_size(case):
    _, ours = pair(torch.bfloat16, **CASES[case])
    x = torch.randn(33, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        whole = ours(x)
        for rows in (1, 2, 5, 17):
            assert torch.equal(ours(x[:rows]), whole[:rows])


@pytest.mark.parametrize("case", CASES)
def test_merge_is_dense_and_unmerge_brings_back_the_bytes(case):
    _, ours = pair(**CASES[case])
    ours.eval()
    x = torch.randn(5, 96)
    before = ours(x)
    bytes_before = ours.base_model.model.up.base_layer.values.clone()
    ours.merge_adapter()
    assert type(ours.base_model.model.up.base_layer) is nn.Linear
    assert (ours(x) - before).norm() <= 1e-5 * before.norm()
    ours.unmerge_adapter()
    assert torch.equal(ours.base_model.model.up.base_layer.values, bytes_before)
    assert torch.equal(ours(x), before)
    merged = ours.merge_and_unload(safe_merge=True)
    assert type(merged.up) is nn.Linear
    assert (merged(x) - before).norm() <= 1e-5 * before.norm()


def test_adapters_switch_stack_and_disable():
    _, ours = pair(r=8)
    ours.add_adapter("second", LoraConfig(r=4, target_modules=["up"], init_lora_weights=False))
    x = torch.randn(5, 96)
    layer = ours.base_model.model.up
    assert isinstance(layer, LoraLinear)
    with torch.no_grad():
        base = layer.base_layer(x)
        first = layer(x)
        layer.set_adapter("second")
        second = layer(x)
        layer.set_adapter(["default", "second"])
        both = layer(x)
        assert not torch.equal(first, second)
        assert (both - (first + second - base)).norm() <= 1e-5 * both.norm()
        with ours.disable_adapter():
            assert torch.equal(layer(x), base)


def test_adapter_files_are_pefts(tmp_path):
    peft_model, ours = pair(r=8, use_dora=True)
    x = torch.randn(5, 96)
    ours.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(replace_linears(Block(), "nf4", double_quant=True, skip=()), tmp_path)
    plain = again(x)
    mg.optimize(again)
    assert torch.equal(again(x), ours(x))
    assert (plain - ours(x)).norm() <= 1e-5 * plain.norm()
    assert (peft_model(x) - ours(x)).norm() <= 1e-5 * plain.norm()


def test_optimize_touches_only_quantised_layers():
    torch.manual_seed(0)
    block = Block()
    block.up = QuantLinear.from_linear(block.up)
    model = mg.add_lora(block, LoraConfig(target_modules=["up", "down"]))
    assert isinstance(model.base_model.model.up, LoraLinear)
    assert not isinstance(model.base_model.model.down, LoraLinear)
