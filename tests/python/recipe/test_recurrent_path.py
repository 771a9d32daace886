"""Recurrent layers learn: a tiny Qwen3.5 and a tiny Qwen3-Next, pretrained here and packed to NF4, answer the
tutorial's questions after a recipe on packed rows, not before; so does the merged model in transformers."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig

import monograph as mg
from monograph.cli import native
from monograph.nn import QuantLinear
from support.native_tool import run
from support.tutorial_run import assert_learns, make_world

pytestmark = pytest.mark.slow
DENSE = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
OWN = {
    "intermediate_size": 128,
    "num_key_value_heads": 4,
    "head_dim": 32,  # positions turn a quarter of it
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {  # the config, and how many packed projections a GatedDeltaNet has
    "qwen3_5": (Qwen3_5TextConfig, OWN, 5),
    "qwen3_next": (Qwen3NextConfig, OWN | {"mlp_only_layers": [0, 1]}, 3),
}
KEYS = {"torch_compile": False, "num_epochs": 7, "learning_rate": 6e-3}


@pytest.mark.parametrize("family", FAMILIES)
def test_quantize_train_merge_generate(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "exec_native", lambda arguments: run(*arguments).returncode)
    kind, own, projections = FAMILIES[family]
    keys, asked, path = make_world(tmp_path, kind, own, KEYS, ("--to", "nf4"), 120, mg.optimize)
    assert keys["sample_packing"]
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    stored = load_file(file)
    for end in DENSE:
        found = [tensor.dtype for name, tensor in stored.items() if name.endswith(end)]
        assert set(found) == {torch.bfloat16}, end

    recipe, before = assert_learns(keys, asked, path, capsys)
    base = mg.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    packed = [n for n, m in base.named_modules() if isinstance(m, QuantLinear) and "linear_attn" in n]
    assert len(packed) == projections
    tuned = mg.optimize(PeftModel.from_pretrained(base, recipe.output_dir)).eval()
    merged = AutoModelForCausalLM.from_pretrained(f"{recipe.output_dir}-merged", dtype=torch.float32).eval()
    tokens = torch.cat([before.tokens(one["instruction"]) for one in asked[:8]])
    with torch.no_grad():
        want = tuned(tokens, use_cache=False).logits
        assert (merged(tokens).logits - want).norm() <= 2**-5 * want.norm()  # bf16 keeps 8 bits of a weight
