"""The models of recipes/*.yml: their sizes as the hub's config.json has them, tiny ones of the same class.

Nothing is downloaded. The values are what estimates are counted from; a tiny model has the same class, the
same kinds of layers and the chat template of its family, with random weights.
"""

from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
import trl
from safetensors.torch import load_file, save_file

from monograph.hf.transformers.loading import auto_class
from support.recipe_files import make_tokenizer

TRLS = pathlib.Path(trl.__file__).parent / "chat_templates"
OURS = pathlib.Path(__file__).parents[2] / "files" / "chat_templates"
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
OLMO = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class HubModel:
    """recipe: recipes/RECIPE.yml; values, tiny: arguments of the config class; eos: what ends a turn."""

    recipe: str
    hub: str
    config: str
    values: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)
    template: pathlib.Path | str = ""
    eos: str = "</s>"
    tokens: tuple[str, ...] = ()
    format: str = "nf4"
    not_packed: tuple[str, ...] = ()  # layers that the checkpoint has in 16 bits
    period: int = 1  # after so many layers their kinds repeat; 0: they do not

    @property
    def layers(self) -> int:
        values = self.values.get("text_config", self.values)
        return int(values["num_hidden_layers"])

    def full_config(self, layers: int | None = None) -> Any:
        if layers is None:
            return self._config(self.values)
        if "text_config" in self.values:
            return self._config(
                self.values | {"text_config": self.values["text_config"] | {"num_hidden_layers": layers}}
            )
        return self._config(self.values | {"num_hidden_layers": layers})

    def tiny_config(self, **own: Any) -> Any:
        small = _sizes(64, 96, 2, 4, 2, 512, max_position_embeddings=512, **own)
        if "text_config" in self.tiny:
            return self._config(self.tiny | {"text_config": small | self.tiny["text_config"]})
        return self._config(small | self.tiny)

    def _config(self, values: dict[str, Any]) -> Any:
        made = getattr(transformers, self.config)(**values)
        if "text_config" in values:  # the hub's folder has the vision tower too
            made.architectures = [self.config.replace("Config", "ForConditionalGeneration")]
        made.use_cache = False
        return made


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        **more,
    }


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA: Any = {"template": TRLS / "llama3_1.jinja", "eos": "<|eot_id|>"}
LLAMA["tokens"] = ("<|start_header_id|>", "<|end_header_id|>")
QWEN: Any = {"template": TRLS / "qwen3.jinja", "eos": "<|im_end|>", "tokens": ("<think>", "</think>")}
QWEN_MOE = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
FOUR_LOCAL = ["sliding_attention"] * 4 + ["full_attention"]
GRANITE_SCALES = {
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
TINY_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
TINY_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}

MODELS = [
    HubModel("llama3", "meta-llama/Llama-3.1-8B-Instruct", "LlamaConfig",
             _sizes(4096, 14336, 32, 32, 8, 128256, **UNTIED), **LLAMA),
    HubModel("llama3", "meta-llama/Llama-3.2-1B-Instruct", "LlamaConfig",
             _sizes(2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED)),
    HubModel("qwen3", "Qwen/Qwen3-8B", "Qwen3Config",
             _sizes(4096, 12288, 36, 32, 8, 151936, head_dim=128, **UNTIED), {"head_dim": 16}, **QWEN),
    HubModel("qwen3", "Qwen/Qwen3-0.6B", "Qwen3Config",
             _sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, **TIED)),
    HubModel("qwen3_moe", "Qwen/Qwen3-30B-A3B", "Qwen3MoeConfig",
             _sizes(2048, 6144, 48, 32, 4, 151936, **QWEN_MOE, **UNTIED),
             {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
             **QWEN),
    HubModel("qwen3_5", "Qwen/Qwen3.5-9B", "Qwen3_5Config",
             {"text_config": _sizes(4096, 12288, 32, 16, 4, 248320, head_dim=256)},
             {"text_config": TINY_DELTA | {"head_dim": 16, "rope_parameters": ROPE},
              "vision_config": VISION | {"out_hidden_size": 64, "num_position_embeddings": 16}},
             TRLS / "qwen3_5_think.jinja", "<|im_end|>", QWEN["tokens"], period=4),
    HubModel("gpt_oss", "openai/gpt-oss-20b", "GptOssConfig",
             _sizes(2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4),
             {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
             TRLS / "gptoss.jinja", "<|return|>",
             ("<|start|>", "<|end|>", "<|call|>", "<|channel|>", "<|message|>"), "mxfp4",
             (r"model.layers.\d+.self_attn",), 2),
    HubModel("gemma3", "google/gemma-3-1b-it", "Gemma3TextConfig",
             _sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512),
             {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
             TRLS / "gemma3.jinja", "</s>", ("<start_of_turn>", "<end_of_turn>"), period=6),
    HubModel("gemma4", "google/gemma-4-E2B-it", "Gemma4Config",
             {"text_config": _sizes(1536, 6144, 35, 8, 1, 262144, num_kv_shared_layers=20,
                                    use_double_wide_mlp=True, layer_types=FOUR_LOCAL * 7)},
             {"text_config": TINY_GEMMA4}, TRLS / "gemma4.jinja", "</s>", ("<|turn>", "<turn|>"), period=0),
    HubModel("mistral", "mistralai/Mistral-7B-Instruct-v0.3", "MistralConfig",
             _sizes(4096, 14336, 32, 32, 8, 32768, **UNTIED), {}, OURS / "mistral_v3.jinja", "</s>",
             ("[INST]", "[/INST]")),
    HubModel("phi", "microsoft/Phi-4-mini-instruct", "Phi3Config",
             _sizes(3072, 8192, 32, 24, 8, 200064, partial_rotary_factor=0.75, pad_token_id=199999, **TIED),
             {"partial_rotary_factor": 0.75}, TRLS / "phi3_5.jinja", "<|endoftext|>",
             ("<|user|>", "<|assistant|>", "<|end|>")),
    HubModel("phi", "microsoft/phi-4", "Phi3Config", _sizes(5120, 17920, 40, 40, 10, 100352, **UNTIED)),
    HubModel("granite", "ibm-granite/granite-3.3-8b-instruct", "GraniteConfig",
             _sizes(4096, 12800, 40, 32, 8, 49159, **GRANITE_SCALES, **TIED), GRANITE_SCALES, GRANITE,
             "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
    HubModel("olmo", "allenai/OLMo-2-1124-7B-Instruct", "Olmo2Config",
             _sizes(4096, 11008, 32, 32, 32, 100352, **UNTIED), {}, OLMO, "<|endoftext|>",
             ("<|user|>", "<|assistant|>")),
]  # fmt: skip
# The model that a recipe names; the others of its family are further rows of its page.
FIRST = {
    name: next(m for m in MODELS if m.recipe == name) for name in dict.fromkeys(m.recipe for m in MODELS)
}


def make_tiny(model: HubModel, folder: pathlib.Path) -> None:
    """A folder as the hub has it: the class of the model, its tokenizer and its chat template."""
    template = model.template
    text = template.read_text() if isinstance(template, pathlib.Path) else template
    tokenizer = make_tokenizer(folder, chat_template=text)
    tokenizer.add_special_tokens({"additional_special_tokens": list(model.tokens), "eos_token": model.eos})
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) <= 512
    config = model.tiny_config(bos_token_id=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=2)
    torch.manual_seed(0)
    made = auto_class(config).from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    made.save_pretrained(folder)
    if model.format == "mxfp4":
        _as_shipped(folder)


def _as_shipped(folder: pathlib.Path) -> None:
    """MXFP4 bytes at random where gpt-oss has its experts, under the names of its files."""
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, cols, rows = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(0, 256, (count, rows, cols // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(119, 123, (count, rows, cols // 32), dtype=torch.uint8)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(settings))
