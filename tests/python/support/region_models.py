"""Tiny models whose decoder layers become regions, and the comparison of two of them."""

import torch
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import monograph as mg
from monograph.nn import QuantLinear

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


def build(layers=1, config=LORA, formats=("nf4",), checkpointing=False):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SMALL)).to(torch.bfloat16)
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and "head" not in name]
    for place, (name, linear) in enumerate(linears):
        model.set_submodule(name, QuantLinear.from_linear(linear, formats[place % len(formats)]))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model = mg.add_lora(model, config)
    trained_b(model)
    return model.train()


def trained_b(model):
    """B that is not zero, so that A has gradients."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)


def ids(length=12, rows=2, seed=2):
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, tokens=None):
    tokens = ids() if tokens is None else tokens
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not loss.requires_grad:
        return loss, {}
    gradients = torch.autograd.grad(loss, named.values(), materialize_grads=True)
    return loss, dict(zip(named, gradients, strict=True))


def assert_same(model, plain, tokens=None):
    (loss, gradients), (want, wanted) = loss_and_gradients(model, tokens), loss_and_gradients(plain, tokens)
    assert loss.item() == want.item()
    assert gradients.keys() >= wanted.keys()
    for name, gradient in gradients.items():
        # A region takes all that is trained: what it does not read has gradients of zero, not none.
        assert torch.equal(gradient, wanted.get(name, torch.zeros_like(gradient))), name
    return gradients


def compiled(model):
    def run(tokens):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return torch.compile(run, backend="aot_eager", fullgraph=True)


def batch():
    return {"input_ids": ids(), "labels": ids()}


def steps_equal(step, eager, rows=None):
    for row in rows or [batch(), batch()]:
        got, want = step([row], 1e-2), eager([row], 1e-2)
        assert got.loss.item() == want.loss.item()
        assert torch.equal(step.state.flat, eager.state.flat)
        assert torch.equal(step.state.exp_avg, eager.state.exp_avg)


class InPlace(LlamaDecoderLayer):
    def forward(self, hidden_states, **options):
        result = super().forward(hidden_states, **options)
        result[:, ::2].mul_(2)
        return result
