"""from_pretrained: where files come from, dtypes, experts, and what is said about weights that stay dense."""

import copy
import fnmatch
import json
import logging
import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import monograph as mg
from monograph.hf.transformers import loading
from monograph.nn import QuantLinear
from monograph.recipe.config import model_folder
from support import tiny_models

NF4 = "nf4"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """bf16, with norms in float32."""
    folder = tiny_models.save_llama(tmp_path_factory.mktemp("source"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: t.float() if "norm" in name else t for name, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def dtypes(model, part):
    return {p.dtype for name, p in model.named_parameters() if part in name}


def weight_dtypes(model):
    return {layer.weight.dtype for layer in model.modules() if isinstance(layer, QuantLinear)}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, torch.bfloat16),
        ({"torch_dtype": torch.float16}, torch.float16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "auto"}, torch.bfloat16),
    ],
    ids=str,
)
def test_dtype_under_both_names_reaches_every_tensor(source, options, wanted):
    model = mg.from_pretrained(source, mg.MonographConfig(NF4), **options)
    assert dtypes(model, "norm") == dtypes(model, "embed") == dtypes(model, "lm_head") == {wanted}
    assert weight_dtypes(model) == {wanted}
    assert model.dtype == model.config.dtype == wanted


def test_two_dtypes_that_contradict_are_named(source):
    with pytest.raises(ValueError, match=r"dtype is torch.float32 and torch_dtype is torch.float16, wanted"):
        mg.from_pretrained(source, dtype=torch.float32, torch_dtype=torch.float16)


@pytest.mark.parametrize("format", [NF4, "fp8-block", "mxfp4"])
def test_dtype_holds_for_quantised_folders_too(source, tmp_path, format):
    """Norms in float32 beside packed weights whose producer noted bf16."""
    mg.from_pretrained(source, mg.MonographConfig(format)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: t.float() if "norm" in name else t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    model = mg.from_pretrained(tmp_path, dtype=torch.float16)
    assert dtypes(model, "norm") == dtypes(model, "lm_head") == weight_dtypes(model) == {torch.float16}


def test_what_a_model_wants_in_float32_stays_so(source, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    model = mg.from_pretrained(source, mg.MonographConfig(NF4), dtype=torch.bfloat16)
    assert dtypes(model, "input_layernorm") == {torch.float32}
    assert dtypes(model, "post_attention_layernorm") == {torch.bfloat16}


def moe_configs():
    from transformers import DbrxConfig, Qwen3MoeConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 64}
    yield (
        Qwen3MoeConfig(**sizes, moe_intermediate_size=64, num_experts=4, head_dim=32, hidden_act="relu"),
        "mlp.experts.gate_up_proj",
    )
    ffn = {"ffn_hidden_size": 64, "moe_num_experts": 4, "hidden_size": 64}
    attn = {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}
    dbrx = DbrxConfig(d_model=64, n_heads=2, n_layers=1, vocab_size=64, ffn_config=ffn, attn_config=attn)
    yield dbrx, "ffn.experts.mlp.w1"


@pytest.mark.parametrize(("config", "layer"), list(moe_configs()), ids=lambda value: type(value).__name__)
def test_experts_are_refused_by_name(tmp_path, config, layer):
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{layer}.*a weight of experts, cannot be packed.*skip_modules"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=mg.MonographConfig(NF4))


def test_experts_may_stay_dense_on_purpose_and_their_share_is_said(tmp_path, caplog):
    config, _ = next(moe_configs())
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    mg.from_pretrained(tmp_path, mg.MonographConfig(NF4, skip_modules=["lm_head", "experts"]))
    (record,) = [r for r in caplog.records if r.name == "monograph.transformers_quantizer"]
    # q and o 64 x 64, k and v 32 x 64; gate_up 4 x 128 x 64, down 4 x 64 x 64, the router 4 x 64
    packed, dense = 2 * 64 * 64 + 2 * 32 * 64, 4 * 128 * 64 + 4 * 64 * 64 + 4 * 64
    assert record.levelno == logging.WARNING
    assert f"{packed / (packed + dense):.0%} of the linear weights are packed" in record.message
    assert "Qwen3MoeExperts is not an nn.Linear" in record.message
    assert "model.layers.0.mlp.experts.gate_up_proj" in record.message


def said(caplog):
    return [r.message for r in caplog.records if r.name == "monograph.transformers_quantizer"]


def test_a_dense_head_of_any_size_is_no_cause_for_a_warning(tmp_path, caplog):
    tiny_models.save_llama(tmp_path, vocab_size=8192)
    mg.from_pretrained(tmp_path, mg.MonographConfig(NF4))
    assert not said(caplog)


def test_layers_that_stay_dense_are_counted_with_the_reason(source, tmp_path, caplog):
    skipped = mg.MonographConfig(NF4, skip_modules=["lm_head", "down_proj"])
    model = mg.from_pretrained(source, skipped)
    (message,) = said(caplog)
    dense = [layer.weight.numel() for n, layer in model.named_modules() if n.endswith("down_proj")]
    packed = sum(x.in_features * x.out_features for x in model.modules() if isinstance(x, QuantLinear))
    assert f"LlamaForCausalLM: {packed / (packed + sum(dense)):.0%} of the linear weights" in message
    assert "(skip_modules): model.layers.0.mlp.down_proj.weight, model.layers.1.mlp" in message
    caplog.clear()
    model.save_pretrained(tmp_path)
    mg.from_pretrained(tmp_path)
    assert "(dense in the folder): model.layers.0.mlp.down_proj.weight" in said(caplog)[0]


def test_subfolder_reaches_config_and_weights(source, tmp_path):
    shutil.copytree(source, tmp_path / "inner")
    config = json.loads((tmp_path / "inner/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))  # of another model
    model = mg.from_pretrained(tmp_path, mg.MonographConfig(NF4), subfolder="inner")
    assert len(model.model.layers) == 2
    # ModelOpt's file is looked for beside the config as well.
    (tmp_path / "inner/hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert loading.stored_quantization(tmp_path) is None
    assert loading.stored_quantization(tmp_path, subfolder="inner")["quant_method"] == "modelopt"


def test_options_of_the_hub_reach_every_reader(source, monkeypatch):
    """A name on the Hub: nothing but the config and ModelOpt's small file is asked for before the weights."""
    asked = {}

    def config(name, **options):
        asked["config"] = options
        return AutoConfig.for_model("llama")

    def download(name, file, **options):
        asked[file] = options
        raise EntryNotFoundError("no such file")

    def load(name, **options):
        asked["weights"] = options
        return torch.nn.Module()

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", config)
    monkeypatch.setattr(loading, "hf_hub_download", download)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    files = {"revision": "v2", "token": "secret", "subfolder": "inner", "cache_dir": "/cache"}
    mg.from_pretrained("someone/model", **files, trust_remote_code=True, low_cpu_mem_usage=True)
    assert asked["config"] == {**files, "trust_remote_code": True}
    assert asked["hf_quant_config.json"] == files
    assert (files | {"trust_remote_code": True, "low_cpu_mem_usage": True}).items() <= asked[
        "weights"
    ].items()


def test_modelopts_file_on_the_hub_is_read(tmp_path, monkeypatch):
    file = tmp_path / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    monkeypatch.setattr(loading, "hf_hub_download", lambda *_, **__: str(file))
    found = loading.stored_quantization("someone/model", AutoConfig.for_model("llama"))
    assert found == {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}


def test_a_recipe_fetches_the_files_it_needs_and_no_more(monkeypatch):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **o: asked.update(o) or "/there")
    recipe = type("Recipe", (), {"base_model": "someone/model", "revision_of_model": "v2"})
    assert model_folder.model_folder(recipe) == "/there"
    assert asked["revision"] == "v2"
    needed = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    needed += ["tokenizer.json", "tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja"]
    needed += ["generation_config.json", "hf_quant_config.json", "qwen.tiktoken", "modeling_own.py"]
    needed += ["additional_chat_templates/tool_use.jinja"]
    useless = ["pytorch_model.bin", "original/consolidated.00.pth", "original/params.json", "model.gguf"]
    useless += ["consolidated.safetensors", "onnx/config.json", "README.md", "figure.png", "tf_model.h5"]
    useless += ["checkpoint-100/model.safetensors", "metal/model.bin", "training_args.bin", "rng_state.pt"]
    fetched = [
        name
        for name in needed + useless
        if any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"])
        and not any(fnmatch.fnmatch(name, pattern) for pattern in asked["ignore_patterns"])
    ]
    assert fetched == needed


def test_num_parameters_counts_elements(tmp_path):
    """As transformers does for bitsandbytes; a copy, an adapter and the dense model count right too."""
    dense = tiny_models.tiny_llama(dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path)
    packed = mg.from_pretrained(tmp_path, mg.MonographConfig("nf4", double_quant=True))
    for exclude in (False, True):
        wanted = dense.num_parameters(exclude_embeddings=exclude)
        assert packed.num_parameters(exclude_embeddings=exclude) == wanted
        assert copy.deepcopy(packed).num_parameters(exclude_embeddings=exclude) == wanted
    assert packed.num_parameters(only_trainable=True) < dense.num_parameters()
    copied = copy.deepcopy(packed)
    copied.lm_head = None
    assert copied.num_parameters() < packed.num_parameters()  # its own layers, not those it was copied from
    assert packed.dequantize().num_parameters() == dense.num_parameters()
