"""The tutorial with another model than its Llama: pretrained on lists, packed, trained, merged and asked."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from monograph.__main__ import main
from monograph.recipe import check_keys
from monograph.recipe.run.example import RECIPE, make_tokenizer, questions, read_lists
from monograph.recipe.run.generate import Generator
from support import learning
from support.native_tool import run
from support.recipe_files import write_jsonl


def make_world(
    root: pathlib.Path,
    kind: Any,
    own: Any,
    keys: Any,
    pack: Any,
    steps: int = 240,
    prepare: Any = lambda model: model,
    **how: Any,
) -> Any:
    """The tutorial's folder with a model of config class `kind`, packed by the tool with arguments `pack`.

    Gives the recipe's keys, the questions held back and the recipe's path. `how` goes to from_config,
    `prepare` sees the model before it is pretrained.
    """
    (root / "model").mkdir()
    tokenizer = make_tokenizer(str(root / "model"))
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = kind(vocab_size=len(tokenizer), tie_word_embeddings=False, **tokens, **sizes, **own)
    torch.manual_seed(0)
    model = prepare(AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how))
    read_lists(model, tokenizer, steps, lambda text: None)
    model.to(torch.bfloat16).save_pretrained(root / "model")
    run("quantize", root / "model", root / "packed", *pack)
    train_on, held_back = questions()
    write_jsonl(root / "questions.jsonl", train_on)
    write_jsonl(root / "held_back.jsonl", held_back)
    (root / "recipe.yml").write_text(RECIPE.format(folder=root))
    found, asked, path = learning.open_world(root)
    found |= {"base_model": str(root / "packed")} | keys
    (root / "recipe.yml").write_text(json.dumps(found))
    return found, asked, path


def assert_learns(keys: Any, asked: Any, path: str, capsys: Any) -> Any:
    """The packed base answers at most 5 % of the questions held back; tuned, and merged, 95 %.

    Gives the recipe and the Generator of the base. `native.exec_native` runs the tool that was built.
    """
    recipe = check_keys(keys).recipe
    before = Generator(recipe, None)
    assert learning.exact_match(before, asked[:20]) <= 0.05

    assert main(["train", path]) == 0
    assert learning.exact_match(Generator(recipe, recipe.output_dir), asked) >= 0.95
    capsys.readouterr()
    assert main(["generate", path, "--prompt", asked[0]["instruction"], "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == asked[0]["output"] + "\n"

    assert main(["merge", path]) == 0
    merged = keys | {"base_model": f"{recipe.output_dir}-merged", "adapter": "lora"}
    assert learning.exact_match(Generator(check_keys(merged).recipe, None), asked) >= 0.95
    return recipe, before
