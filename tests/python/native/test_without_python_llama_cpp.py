"""From quantize to llama.cpp without Python: what serves the merged model or the adapter says what PEFT says.

Needs PyPI's xllamacpp, which CI does not install.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from monograph.__main__ import main
from support.gguf_models import PROMPT, VOCABULARY, model_of, save
from support.llama_cpp_text import answered, generated, not_text
from support.native_tool import run
from support.recipe_files import write_jsonl

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow
# fp32 against fp32: about 16 products one behind the other, each a sum of at most 96 terms in another order,
# so 16 * 96 * 2^-24 of values of size 1 or less, times ten for values that are larger.
TOLERANCE = 16 * 96 * 2**-24 * 10


def logits_of(folder: pathlib.Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def same_answers(answer: Any, model: Any, ids: list[int], banned: list[int]) -> torch.Tensor:
    """Greedy tokens and log-probabilities of the first; gives those of the model."""
    wanted, margin, log_probs = generated(model, ids, banned)
    count, found, first = answer
    assert count == len(ids)
    error = max(abs(first[str(i)] - log_probs[i].item()) for i in range(VOCABULARY))
    print("margin", margin, "error", error)
    assert error < TOLERANCE
    assert margin > 2 * TOLERANCE
    assert found == wanted
    return log_probs


def test_quantize_finetune_merge_export(tmp_path: pathlib.Path) -> None:
    tokenizer = save(model_of("Llama", torch.bfloat16, 3), "Llama", tmp_path / "model", torch.bfloat16)
    rows = [{"text": f"The dog's {n} dreams aren't over. " * (1 + n % 3)} for n in range(24)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    recipe = {
        "base_model": str(tmp_path / "nf4"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "lora_r": 8,
        "datasets": [{"path": str(tmp_path / "train.jsonl"), "type": "completion"}],
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "sequence_len": 96,
        "sample_packing": True,
        "learning_rate": 0.02,
        "max_steps": 12,
        "num_epochs": 9,
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
    }
    config = tmp_path / "recipe.yml"
    config.write_text(yaml.safe_dump(recipe))
    tokens = tmp_path / "tokens"
    base = ("--base_model", str(tmp_path / "model"))
    assert main(["preprocess", str(config), *base, "--tokens", str(tokens), "--quiet"]) == 0

    run("quantize", tmp_path / "model", tmp_path / "nf4", "--to", "nf4", "--double-quant")
    run("finetune", config, "--tokens", tokens)
    adapter = ("--adapter", tmp_path / "out")
    run("merge", tmp_path / "nf4", *adapter, "--base", "dequantized", "--out", tmp_path / "merged")
    run("export", tmp_path / "merged", tmp_path / "merged.gguf", "--to", "gguf", "--type", "f32")
    run("dequantize", tmp_path / "nf4", tmp_path / "dense", "--to", "fp32", "--cast-plain")
    run("export", tmp_path / "dense", tmp_path / "base.gguf", "--to", "gguf", "--type", "f32")
    lora = tmp_path / "lora.gguf"
    run("adapter", "convert", tmp_path / "nf4", tmp_path / "out", "--for", "llama.cpp", "--out", lora)

    ids, banned = tokenizer.encode(PROMPT).ids, not_text(tokenizer)
    dense = logits_of(tmp_path / "dense")
    before = generated(dense, ids, banned)[2]
    tuned = PeftModel.from_pretrained(dense, str(tmp_path / "out")).eval()
    by_peft = same_answers(answered(tmp_path / "base.gguf", PROMPT, banned, lora), tuned, ids, banned)
    merged = logits_of(tmp_path / "merged")
    by_merge = same_answers(answered(tmp_path / "merged.gguf", PROMPT, banned), merged, ids, banned)
    # What training changed is far above what merging into bf16 rounds.
    change, rounding = (by_peft - before).abs().max(), (by_merge - by_peft).abs().max()
    print("change", change.item(), "rounding", rounding.item())
    assert change > 0.5
    assert rounding < 0.1 * change
