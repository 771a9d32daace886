"""Recipes on models with experts: trained, merged by the native program, loaded by plain PEFT."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.__main__ import main
from monograph.cli import native
from monograph.recipe import check_keys
from monograph.recipe.run.metrics import read_metrics
from monograph.recipe.train import train
from support.dense_experts import dense_copy
from support.native_tool import run
from support.recipe_files import make_tokenizer, small_recipe, write_jsonl
from support.tiny_moe import save_tiny, tokens

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture
def keys(tmp_path):
    return small_recipe(
        tmp_path,
        "instruction",
        output_dir=str(tmp_path / "out"),
        lora_target_linear=False,
        lora_target_parameters=TARGETS,
        torch_compile=False,
        num_epochs=4,
    )


def make_world(root, family):
    make_tokenizer(root / "model")
    save_tiny(root / "model", family, dtype=torch.bfloat16, vocab_size=400)
    write_jsonl(
        root / "train.jsonl", [{"instruction": f"What is {n}?", "output": f"{n % 7} dog"} for n in range(40)]
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_train_merge_and_plain_peft(family, keys, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "exec_native", lambda arguments: run(*arguments).returncode)
    make_world(tmp_path, family)
    if family == "qwen3_moe":
        keys |= {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    path, out = tmp_path / "recipe.yml", tmp_path / "out"
    path.write_text(json.dumps(keys))
    assert main(["train", str(path), "--merge-lora"]) == 0
    losses = [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert json.loads((out / "monograph.json").read_text())["base"]["packed"]["experts"] is True

    base = mg.from_pretrained(
        tmp_path / "model", mg.MonographConfig("nf4", double_quant=True), dtype=torch.float32
    )
    plain = PeftModel.from_pretrained(dense_copy(tmp_path / "model", base), out).eval()
    ours = mg.optimize(PeftModel.from_pretrained(base, out)).eval()
    want = plain(tokens()).logits
    assert (ours(tokens()).logits - want).abs().max() <= 1e-4 * want.abs().max()
    merged = AutoModelForCausalLM.from_pretrained(f"{out}-merged", dtype=torch.float32).eval()
    # bf16 keeps 8 bits of each merged weight.
    assert (merged(tokens()).logits - want).norm() <= 2**-6 * want.norm()
    with plain.disable_adapter():
        assert (plain(tokens()).logits - want).norm() > 2**-3 * want.norm()


def test_the_loss_of_the_routers_is_that_of_the_recipe(keys, tmp_path):
    make_world(tmp_path, "qwen3_moe")
    losses = []
    for own in ({}, {"output_router_logits": True, "router_aux_loss_coef": 0.5}):
        recipe = check_keys(keys | own | {"max_steps": 1}).recipe
        train(recipe)
        losses.append(read_metrics(tmp_path / "out" / "metrics.jsonl")[0]["loss"])
    # Two tokens to two of eight experts each: 2 if they are spread evenly, more if not.
    assert 1.0 < losses[1] - losses[0] < 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout is 0.1 and lora_target_parameters are given; PEFT wants 0.0"),
        ({"peft_use_dora": True}, "peft_use_dora is true and lora_target_parameters are given"),
        ({"peft_init_lora_weights": "pissa"}, "their start is PEFT's own"),
        ({"router_aux_loss_coef": 0.01}, "without output_router_logits; write output_router_logits: true"),
    ],
)
def test_what_a_recipe_refuses(keys, tmp_path, change, message):
    make_world(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match=message):
        check_keys(keys | change)
