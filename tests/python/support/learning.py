"""What the test that it learns measures: exact answers, and the losses of the peers on the same data.

As a program it trains, writes the losses and draws the picture of docs/reference/recipe.md; with --draw it
draws what was written:

    PYTHONPATH=tests/python python -m support.learning bench/results/learning.jsonl docs/images/learning.png
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import torch
import yaml

from monograph.recipe.run.example import write_example


def open_world(folder: str | pathlib.Path) -> Any:
    """Of an example that was made: its keys, the questions held back, and the path of its recipe."""
    path = os.path.join(folder, "recipe.yml")
    with open(path) as file:
        keys = yaml.safe_load(file)
    with open(os.path.join(folder, "held_back.jsonl")) as file:
        return keys, [json.loads(line) for line in file], path


def quantised_folder(source: str | pathlib.Path, folder: str | pathlib.Path, format: str) -> Any:
    """A model folder in another format, with its tokenizer."""
    import monograph as mg

    mg.from_pretrained(source, mg.MonographConfig(format)).save_pretrained(folder)
    for name in os.listdir(source):
        if name.startswith(("tokenizer", "special_tokens")):
            shutil.copy(os.path.join(source, name), folder)
    return folder


def exact_match(generator: Any, asked: list[Any]) -> float:
    """The share of questions whose greedy answer is exactly right."""
    from monograph.recipe.run.generate import Sampling

    right = 0
    for one in asked:
        tokens = generator.tokens(one["instruction"])
        right += generator.answer(tokens, Sampling(max_new_tokens=8), lambda text: None) == one["output"]
    return right / len(asked)


def peer_losses(recipe: Any, steps: int, seed: int | None = None) -> list[float]:
    """The same run by transformers, PEFT and bitsandbytes, eager: the losses of its first steps."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from monograph.recipe.data.encode import load_tokenizer
    from monograph.recipe.data.prepare import prepare
    from monograph.recipe.run.batches import Batches
    from monograph.recipe.run.load_model import lora_config
    from monograph.recipe.run.schedule import learning_rate

    tokenizer = load_tokenizer(recipe, recipe.base_model)
    documents = prepare(recipe, tokenizer).train
    recipe.seed = recipe.seed if seed is None else seed
    batches = Batches(recipe, documents, tokenizer.pad_token_id, training=True)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        recipe.base_model, quantization_config=quantised, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    torch.manual_seed(recipe.seed)
    model = get_peft_model(model, lora_config(recipe)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=recipe.weight_decay)
    epochs, losses = batches.epochs(recipe), []
    for step in range(min(steps, epochs.total)):
        micro = batches.step(*epochs.place(step))
        targets = sum(batch["num_items_in_batch"] for batch in micro)
        total = 0.0
        for batch in micro:
            inputs = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
            loss = model(**inputs, num_items_in_batch=targets, use_cache=False).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(recipe, step, epochs.total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def measure(results: str) -> None:
    """Losses of the three runs, one run a line."""
    from monograph.recipe import check_keys
    from monograph.recipe.run.metrics import read_metrics
    from monograph.recipe.train import train

    with tempfile.TemporaryDirectory() as folder:
        write_example(folder)
        keys, _, _ = open_world(folder)
        train(check_keys(keys).recipe)
        lines = read_metrics(os.path.join(keys["output_dir"], "metrics.jsonl"))
        runs = {"Monograph": [line["loss"] for line in lines if "loss" in line]}
        for name, seed in (("transformers + PEFT + bitsandbytes", None), ("the peer with another seed", 43)):
            runs[name] = peer_losses(check_keys(keys).recipe, len(runs["Monograph"]), seed)
    with open(results, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"run": name, "losses": losses}) + "\n" for name, losses in runs.items())


def draw(results: str, path: str) -> None:
    """The first 120 steps; ours last, above the others."""
    from monograph.bench.plot import OTHER_PEER, OURS, PEER
    from monograph.recipe.run.metrics import plot_losses

    with open(results, encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    points = {
        run["run"]: [{"step": step, "loss": loss} for step, loss in enumerate(run["losses"][:120], 1)]
        for run in reversed(runs)
    }
    plot_losses(points, path, dict(zip(points, (OTHER_PEER, PEER, OURS), strict=True)))


if __name__ == "__main__":
    if "--draw" not in sys.argv:
        measure(sys.argv[1])
    draw(*sys.argv[1:3])
