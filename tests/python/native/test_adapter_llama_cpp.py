"""llama.cpp itself with the converted adapter, against PEFT: logits of a tiny model of each architecture.

Needs PyPI's xllamacpp, which CI does not install.
"""

import json

import pytest
import torch
import transformers
from peft import PeftModel

from support.llama_cpp_model import write_model
from support.llama_cpp_run import TOKENS, served
from support.merge_reference import adapter_on
from support.native_tool import run

pytest.importorskip("xllamacpp")
DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = {"target_modules": DENSE[:4], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
TWO = {"num_experts_per_tok": 2}
COMMON = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
# Class, settings of its config, settings of LoraConfig.
MODELS = {
    "Llama": ({}, {"target_modules": [*DENSE, "embed_tokens", "lm_head"]}),
    "Mistral": ({"head_dim": 32}, {"target_modules": DENSE}),
    "Qwen2": ({}, {"target_modules": [*DENSE, "lm_head"]}),
    "Qwen3": ({"head_dim": 32}, {"target_modules": DENSE}),
    "Gemma3": (
        {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 4096},
        {"target_modules": DENSE},
    ),
    "Qwen3Moe": (
        {"head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True} | {"num_experts": 4, **TWO},
        EXPERTS,
    ),
    "Mixtral": ({"num_local_experts": 4, **TWO}, EXPERTS),
}


def log_probs(model):
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([TOKENS])).logits[0, -1].float(), -1)


def base_of(name):
    settings, _ = MODELS[name]
    torch.manual_seed(4)
    kind = "Gemma3Text" if name == "Gemma3" else name
    model = getattr(transformers, name + "ForCausalLM")(
        getattr(transformers, kind + "Config")(**(COMMON | settings))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
        model.get_output_embeddings().weight[2] = 0  # never the end of the text
    return model.float().eval()


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_applies_the_converted_adapter_as_peft_does(tmp_path, name):
    model = base_of(name)
    model.save_pretrained(tmp_path / "base")
    write_model(model, tmp_path / "base.gguf")
    base = log_probs(model)
    assert (served(tmp_path / "base.gguf") - base).abs().max() < 1e-3
    settings = MODELS[name][1] | {
        "rank_pattern": {"v_proj": 4},
        "alpha_pattern": {"k_proj": 5},
        "use_rslora": True,
    }
    adapter_on(model, tmp_path / "adapter", torch.float32, r=8, lora_alpha=40, **settings)
    run(
        "adapter",
        "convert",
        tmp_path / "base",
        tmp_path / "adapter",
        "--for",
        "llama.cpp",
        "--out",
        tmp_path / "lora.gguf",
    )
    wanted = log_probs(PeftModel.from_pretrained(base_of(name), tmp_path / "adapter"))
    found = served(tmp_path / "base.gguf", tmp_path / "lora.gguf")
    print(name, "change", (wanted - base).abs().max().item(), "error", (found - wanted).abs().max().item())
    assert (wanted - base).abs().max() > 0.1
    assert (found - wanted).abs().max() < 1e-3


def test_rows_in_the_order_of_transformers_would_be_wrong(tmp_path):
    """The control: without the order of llama.cpp the logits of Llama are off by a hundred times as much."""
    model = base_of("Llama")
    model.save_pretrained(tmp_path / "base")
    write_model(model, tmp_path / "base.gguf")
    adapter_on(model, tmp_path / "adapter", torch.float32, lora_alpha=80, target_modules=["q_proj", "k_proj"])
    wanted = log_probs(PeftModel.from_pretrained(base_of("Llama"), tmp_path / "adapter"))
    config = tmp_path / "base" / "config.json"
    original = config.read_text()
    errors = []
    for type_ in ("llama", "qwen2"):  # the names are the same, the order is not
        config.write_text(json.dumps(json.loads(original) | {"model_type": type_}))
        out = tmp_path / f"{type_}.gguf"
        run("adapter", "convert", tmp_path / "base", tmp_path / "adapter", "--for", "llama.cpp", "--out", out)
        out.write_bytes(out.read_bytes().replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0llama"))
        errors.append((served(tmp_path / "base.gguf", out) - wanted).abs().max().item())
    assert errors[0] < 1e-3
    assert errors[1] > 100 * errors[0]
