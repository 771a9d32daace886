"""Train by recipe, merge with the native tool, generate with transformers."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.recipe import check_keys
from monograph.recipe.train import train
from support.native_tool import run, run_json
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder, its NF4 copy by the native tool, and an adapter trained on the copy by recipe."""
    root = tmp_path_factory.mktemp("train_and_merge")
    make_tokenizer(root / "model")
    make_model(root / "model")
    run("quantize", root / "model", root / "nf4", "--double-quant")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(40)]
    write_jsonl(root / "train.jsonl", rows)
    recipe = small_recipe(
        root,
        "instruction",
        base_model=str(root / "nf4"),
        output_dir=str(root / "adapter"),
        lora_r=8,
        torch_compile=False,
        num_epochs=3,
        micro_batch_size=2,
    )
    train(check_keys(recipe).recipe)
    return root


def test_train_merge_generate(folder):
    report = run_json(
        "merge", folder / "nf4", "--adapter", folder / "adapter", "--base", "dequantized",
        "--to", "bf16", "--out", folder / "merged",
    )  # fmt: skip
    assert report["whole"]["cosine"] > 0.99
    trained = PeftModel.from_pretrained(mg.from_pretrained(folder / "nf4"), str(folder / "adapter"))
    mg.optimize(trained)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.bfloat16)
    assert not hasattr(merged.config, "quantization_config")
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        base = mg.from_pretrained(folder / "nf4")(ids).logits.float()
        want, got = trained(ids).logits.float(), merged(ids).logits.float()
    # Two layers of bf16 weights rounded once more, against what training changed.
    assert (got - want).norm() <= 2**-5 * want.norm()
    assert (got - want).norm() <= 0.2 * (want - base).norm()
    answers = [
        model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=2)
        for model in (trained, merged)
    ]
    assert torch.equal(*answers)


def test_another_base_is_refused(folder, tmp_path):
    make_model(tmp_path / "other", seed=1)
    make_tokenizer(tmp_path / "other")
    run("quantize", tmp_path / "other", tmp_path / "other-nf4", "--double-quant")
    refused = run(
        "merge", tmp_path / "other-nf4", "--adapter", folder / "adapter", "--base", "dequantized",
        "--out", tmp_path / "merged", code=3,
    )  # fmt: skip
    assert "hash" in refused.stderr or "base" in refused.stderr
    assert not (tmp_path / "merged").exists()
