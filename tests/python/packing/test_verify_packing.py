"""A probe that finds models which mix the documents of a packed row, whatever their class says."""

import pytest
import torch
import transformers

import monograph as mg
from monograph.training import verify_packing

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = SIZES | {"num_key_value_heads": 1, "intermediate_size": 64, "head_dim": 16}
BERT = transformers.BertConfig(**SIZES, intermediate_size=64, is_decoder=True)
BART = transformers.BartConfig(
    vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=64
)
KINDS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**GROUPED)),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**GROUPED, sliding_window=4)),
    "bart": (transformers.BartForCausalLM, BART),
    "bert": (transformers.BertLMHeadModel, BERT),
}


def build(kind, attention, dtype=torch.float32):
    torch.manual_seed(0)
    maker, config = KINDS[kind]
    model = maker(config).to(dtype).train()
    if attention == "monograph":
        return mg.optimize(model)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "monograph"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_models_that_read_borders_pass_and_stay_as_they_were(kind, attention, dtype):
    model = build(kind, attention, dtype)
    verify_packing(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("kind", "attention"), [("bart", "sdpa"), ("bart", "monograph"), ("bert", "sdpa")])
def test_models_that_mix_documents_are_named(kind, attention):
    with pytest.raises(ValueError, match=r"packed rows on B\w+: a document sees another of its row\. Logits"):
        verify_packing(build(kind, attention))


def test_our_attention_mends_bert():
    verify_packing(build("bert", "monograph"))


def test_it_sees_through_peft():
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    verify_packing(mg.optimize(peft.get_peft_model(build("llama", "sdpa"), config)))
    with pytest.raises(ValueError, match="a document sees another of its row"):
        verify_packing(peft.get_peft_model(build("bart", "sdpa"), config))


class Mixing(torch.nn.Module):
    """Every token sees the whole row, those before it and those behind."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 0.1 * x.mean(1, keepdim=True)


def test_both_directions_are_seen():
    model = build("llama", "monograph")
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="a document sees another of its row"):
        verify_packing(model)


def test_logits_that_are_no_numbers_are_named():
    model = build("llama", "monograph")
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="gives logits of nan"):
        verify_packing(model)
