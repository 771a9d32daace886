"""Experts learn: a tiny gpt-oss and a tiny Qwen3-MoE, pretrained here and packed, answer the tutorial's
questions after a recipe on experts and attention, not before; so do the merged model and plain PEFT."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

import learning
import monograph as mg
import monograph.integrations.transformers.experts
from monograph.__main__ import main
from monograph.commands import native
from monograph.nn import PackedExperts
from monograph.recipe import check_keys
from monograph.recipe.example import RECIPE, make_tokenizer, questions, read_lists
from monograph.recipe.generate import Generator
from native_tool import run
from recipe_files import write_jsonl
from test_packed_experts import dense_copy

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {  # the config, what its folder is packed to
    "gpt_oss": (
        GptOssConfig,
        {"intermediate_size": 32, "num_local_experts": 4, "rope_parameters": ROPE},
        "mxfp4",
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"moe_intermediate_size": 32, "num_experts": 4}, "nf4"),
}


def make_world(root, family):
    """The tutorial's folder with a model that has experts, packed by the tool."""
    (root / "model").mkdir()
    tokenizer = make_tokenizer(str(root / "model"))
    kind, own, format = FAMILIES[family]
    config = kind(
        **own,
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="monograph")
    read_lists(model, tokenizer, 240, lambda text: None)
    model.to(torch.bfloat16).save_pretrained(root / "model")
    run("quantize", root / "model", root / "packed", "--to", format, "--experts", "stack")
    train_on, held_back = questions()
    write_jsonl(root / "questions.jsonl", train_on)
    write_jsonl(root / "held_back.jsonl", held_back)
    (root / "recipe.yml").write_text(RECIPE.format(folder=root))
    keys, asked, path = learning.open_world(root)
    keys |= {
        "base_model": str(root / "packed"),
        "lora_target_linear": False,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "num_epochs": 9,
        "learning_rate": 6e-3,
    }
    (root / "recipe.yml").write_text(json.dumps(keys))
    return keys, asked, path


@pytest.mark.parametrize("family", FAMILIES)
def test_train_merge_generate(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "hand_over", lambda arguments: run(*arguments).returncode)
    keys, asked, path = make_world(tmp_path, family)
    recipe = check_keys(keys).recipe
    before = Generator(recipe, None)
    stacks = [layer for layer in before.model.modules() if isinstance(layer, PackedExperts)]
    assert [sorted(layer.stacks) for layer in stacks] == [["down_proj", "gate_up_proj"]] * 2
    assert learning.exact_match(before, asked[:20]) <= 0.05

    assert main(["train", path]) == 0
    assert learning.exact_match(Generator(recipe, recipe.output_dir), asked) >= 0.95
    capsys.readouterr()
    assert main(["generate", path, "--prompt", asked[0]["instruction"], "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == asked[0]["output"] + "\n"

    assert main(["merge", path]) == 0
    merged = keys | {"base_model": f"{recipe.output_dir}-merged", "adapter": "lora"}
    assert learning.exact_match(Generator(check_keys(merged).recipe, None), asked) >= 0.95

    # The adapter in plain PEFT, on the 16-bit values that the packed bytes hold.
    base = mg.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    plain = PeftModel.from_pretrained(dense_copy(tmp_path / "model", base), recipe.output_dir).eval()
    ours = mg.optimize(PeftModel.from_pretrained(base, recipe.output_dir)).eval()
    generator = Generator(recipe, None)
    tokens = torch.cat([generator.tokens(one["instruction"]) for one in asked[:8]])
    with torch.no_grad():
        want, got = plain(tokens).logits, ours(tokens).logits
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
