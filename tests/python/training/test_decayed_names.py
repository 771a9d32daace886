"""Which parameters weight decay pulls to zero, whatever an adapter is called."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from monograph.training.flat_parameters import decayed_names


def small_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def decayed(adapter):
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "embed_tokens"],
        modules_to_save=["lm_head", "input_layernorm"],
        use_dora=False,
        lora_bias=False,
    )
    model = get_peft_model(small_model(), config, adapter_name=adapter)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name.replace(f".{adapter}", "") for name in decayed_names(model) & trained}


@pytest.mark.parametrize("adapter", ["norm", "bias", "my_norm", "layernorm"])
def test_an_adapter_named_as_a_norm_is_decayed(adapter):
    found = decayed(adapter)
    assert found == decayed("default")
    parts = {name.split("layers.0.")[-1] for name in found}
    assert {"self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight"} <= parts
    assert any(name.endswith("lora_embedding_A") for name in found)
    assert any("lm_head.modules_to_save" in name for name in found)
    assert not any("input_layernorm" in name for name in found)
