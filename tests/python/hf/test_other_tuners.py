"""PEFT's tuners besides LoRA on packed layers: what they compute on the dequantised weights, or an error."""

import peft
import pytest
import torch
from peft import get_peft_model

from support.packed_block import dense_copy, packed_block

CONFIGS = {
    "IA3": lambda: peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"]),
    "LoHa": lambda: peft.LoHaConfig(target_modules=["up"], r=4, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(target_modules=["up"], r=4, init_weights=False),
    "OFT": lambda: peft.OFTConfig(target_modules=["up"], oft_block_size=16, init_weights=False),
    "BOFT": lambda: peft.BOFTConfig(target_modules=["up"], boft_block_size=16, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(target_modules=["up"], r=8),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["up"], init_r=4, total_step=10),
    "FourierFT": lambda: peft.FourierFTConfig(target_modules=["up"], n_frequency=32, init_weights=True),
}


def stirred(model, seed=3):
    """Trained values that are none of the start, the same for the same names."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def gradients(model, x):
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_tuner_computes_as_on_the_dequantised_weights(kind):
    x = torch.randn(5, packed_block().up.in_features, generator=torch.Generator().manual_seed(1))
    ours = stirred(get_peft_model(packed_block(), CONFIGS[kind]()))
    want = get_peft_model(dense_copy(packed_block()), CONFIGS[kind]())
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() == {name for name, p in want.named_parameters() if p.requires_grad}
    want.load_state_dict(trained, strict=False)
    (got, got_grads), (out, grads) = gradients(ours, x), gradients(want, x)
    base = packed_block()(x)
    assert (out - base).abs().max() > 1e-3  # the adapter does something
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-4)
    assert got_grads.keys() == grads.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(got_grads[name], gradient, rtol=1e-3, atol=1e-4, msg=name)
