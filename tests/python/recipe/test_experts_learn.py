"""Experts learn: a tiny gpt-oss and a tiny Qwen3-MoE, pretrained here and packed, answer the tutorial's
questions after a recipe on experts and attention, not before; so do the merged model and plain PEFT."""

import pytest
import torch
from peft import PeftModel
from transformers import GptOssConfig, Qwen3MoeConfig

import monograph as mg
import monograph.hf.transformers.experts
from monograph.cli import native
from monograph.nn import PackedExperts
from support.dense_experts import dense_copy
from support.native_tool import run
from support.tutorial_run import assert_learns, make_world

pytestmark = pytest.mark.slow
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {  # the config, what its folder is packed to
    "gpt_oss": (
        GptOssConfig,
        {"intermediate_size": 32, "num_local_experts": 4, "rope_parameters": ROPE},
        "mxfp4",
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 32, "num_experts": 4}, "nf4"),
}
KEYS = {
    "lora_target_linear": False,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "num_epochs": 9,
    "learning_rate": 6e-3,
}


@pytest.mark.parametrize("family", [pytest.param("gpt_oss", marks=pytest.mark.long), "qwen3_moe"])
def test_train_merge_generate(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "exec_native", lambda arguments: run(*arguments).returncode)
    kind, own, format = FAMILIES[family]
    pack = ("--to", format, "--experts", "stack")
    own = own | {"num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
    keys, asked, path = make_world(tmp_path, kind, own, KEYS, pack, experts_implementation="monograph")
    recipe, before = assert_learns(keys, asked, path, capsys)
    stacks = [layer for layer in before.model.modules() if isinstance(layer, PackedExperts)]
    assert [sorted(layer.stacks) for layer in stacks] == [["down_proj", "gate_up_proj"]] * 2

    # The adapter in plain PEFT, on the 16-bit values that the packed bytes hold.
    base = mg.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    plain = PeftModel.from_pretrained(dense_copy(tmp_path / "model", base), recipe.output_dir).eval()
    ours = mg.optimize(PeftModel.from_pretrained(base, recipe.output_dir)).eval()
    tokens = torch.cat([before.tokens(one["instruction"]) for one in asked[:8]])
    with torch.no_grad():
        want, got = plain(tokens).logits, ours(tokens).logits
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
