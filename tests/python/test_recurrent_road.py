"""From a dense folder to a merged model, with recurrent layers: quantize, train packed, merge, generate."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import monograph as mg
from monograph.__main__ import main
from monograph.commands import native
from monograph.nn import QuantLinear
from monograph.recipe import check_keys
from monograph.recipe.generate import Generator, Sampling
from monograph.recipe.metrics import read_metrics
from native_tool import run
from recipe_files import make_tokenizer, small_recipe, write_jsonl
from recurrent_models import build

DENSE = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_quantize_train_merge_generate(family, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "hand_over", lambda arguments: run(*arguments).returncode)
    make_tokenizer(tmp_path / "model")
    more = {"mlp_only_layers": [0, 1]} if family == "qwen3_next" else {}
    model = build(family, 2, torch.bfloat16, vocab_size=400, hidden_size=64, **more)
    model.save_pretrained(tmp_path / "model")
    asked = [{"instruction": f"What is {n}?", "output": f"{n % 7} dog"} for n in range(40)]
    write_jsonl(tmp_path / "train.jsonl", asked)

    done = run("quantize", str(tmp_path / "model"), str(tmp_path / "nf4"))
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "nf4").glob("*.safetensors")
    stored = load_file(file)
    for end in DENSE:
        found = [tensor.dtype for name, tensor in stored.items() if name.endswith(end)]
        assert set(found) == {torch.bfloat16}, end
    for name in tmp_path.glob("model/tokenizer*"):
        (tmp_path / "nf4" / name.name).write_bytes(name.read_bytes())

    out = tmp_path / "out"
    keys = small_recipe(
        tmp_path,
        "instruction",
        base_model=str(tmp_path / "nf4"),
        output_dir=str(out),
        sample_packing=True,
        torch_compile=False,
        num_epochs=4,
    )
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(keys))
    assert main(["train", str(path), "--merge-lora"]) == 0
    losses = [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]

    ids = torch.arange(3, 40)[None]
    base = mg.from_pretrained(tmp_path / "nf4", dtype=torch.float32)
    projections = [n for n, m in base.named_modules() if isinstance(m, QuantLinear) and "linear_attn" in n]
    assert len(projections) == (5 if family == "qwen3_5" else 3)
    tuned = mg.optimize(PeftModel.from_pretrained(base, out)).eval()
    merged = AutoModelForCausalLM.from_pretrained(f"{out}-merged", dtype=torch.float32).eval()
    with torch.no_grad():
        want = tuned(ids, use_cache=False).logits
        assert (merged(ids).logits - want).norm() <= 2**-5 * want.norm()  # bf16 keeps 8 bits of a weight
        with tuned.disable_adapter():
            assert (tuned(ids, use_cache=False).logits - want).norm() > 2**-3 * want.norm()
    generator = Generator(check_keys(keys).recipe, str(out))
    answer = generator.answer(generator.tokens("What is 8?"), Sampling(max_new_tokens=6), lambda text: None)
    assert isinstance(answer, str)
