"""A small world to learn: a Llama pretrained on lists that repeat, then taught to say lists backwards.

The questions at the end are about lists that neither pretraining nor tuning has seen.

    python tests/python/learning.py docs/images/learning.png          # the picture in docs/recipe.md
"""

from __future__ import annotations

import os
import random
import sys
import tempfile

import torch

from recipe_files import make_tokenizer, write_jsonl

THINGS = (
    "fox dog cat owl bee ant cow pig hen bat elk emu eel ram yak ape cod jay boa koi "
    "oak elm ash fir ivy fig rye oat pea yam cup pan pot jar jug bed mat rug key pen"
)
QUESTIONS, ASKED = 600, 60  # to tune on, and to ask at the end
PROMPT = {"no_input_format": "Question: {instruction}? Answer:"}


def sentence(choose):
    """A list, twice; and now and then the words of the questions, which mean nothing yet."""
    words = " ".join(choose.sample(THINGS.split(), choose.choice((2, 3, 4))))
    lead = choose.choice(("", "", "Question: ", "Answer: ", "? "))
    return f"{lead}{words}, {words}, {words}."


def questions():
    """The task: a list of three things, backwards. All lists differ."""
    choose = random.Random(1)
    lists = set()
    while len(lists) < QUESTIONS + ASKED:
        lists.add(tuple(choose.sample(THINGS.split(), 3)))
    return [
        {"instruction": " ".join(words), "output": f" {' '.join(reversed(words))}"} for words in sorted(lists)
    ]


def pretrain(folder, tokenizer, steps=250, rows=40, seed=0):
    """Trains a Llama of four layers on lists until it can repeat them; saves it in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    order = random.Random(seed)
    for _ in range(steps):
        texts = [sentence(order) + "</s>" for _ in range(rows)]
        chosen = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-100)
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    return float(loss.detach())


def make_world(root):
    """Model, questions and recipe in a folder; gives the keys of the recipe and the questions held back."""
    every = questions()
    random.Random(2).shuffle(every)
    texts = [sentence(random.Random(seed)) for seed in range(200)]
    tokenizer = make_tokenizer(root / "model", texts, 500)
    pretrain(root / "model", tokenizer)
    asked = every[:QUESTIONS]
    keys = {
        "base_model": str(root / "model"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "lora_r": 8,
        "lora_alpha": 16,
        "datasets": [{"path": write_jsonl(root / "questions.jsonl", asked), "type": PROMPT}],
        "dataset_prepared_path": str(root / "prepared"),
        "output_dir": str(root / "out"),
        "sequence_len": 256,
        "sample_packing": True,
        "micro_batch_size": 2,
        "num_epochs": 4,
        "learning_rate": 2e-3,
        "warmup_ratio": 0.1,
        "torch_compile": False,
    }
    return keys, every[QUESTIONS:]


def exact_match(generator, asked):
    """The share of questions whose greedy answer is exactly right."""
    from monograph.recipe.generate import Sampling

    right = 0
    for one in asked:
        tokens = generator.tokens(one["instruction"])
        right += generator.answer(tokens, Sampling(max_new_tokens=8), lambda text: None) == one["output"]
    return right / len(asked)


def peer_losses(recipe, seed=None):
    """The same run by transformers, PEFT and bitsandbytes, eager: losses of every step."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from monograph.recipe.batches import Batches
    from monograph.recipe.encode import load_tokenizer
    from monograph.recipe.load_model import lora_config
    from monograph.recipe.prepare import prepare
    from monograph.recipe.schedule import learning_rate

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
    for step in range(epochs.total):
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


def main(path: str) -> None:
    import pathlib

    from monograph.recipe import check_keys
    from monograph.recipe.metrics import plot_losses, read_metrics
    from monograph.recipe.train import train

    with tempfile.TemporaryDirectory() as folder:
        keys, _ = make_world(pathlib.Path(folder))
        train(check_keys(keys).recipe)
        lines = read_metrics(os.path.join(keys["output_dir"], "metrics.jsonl"))
        runs = {"monograph": lines}
        for name, seed in (("transformers + PEFT + bitsandbytes", None), ("the same, another seed", 43)):
            losses = peer_losses(check_keys(keys).recipe, seed)
            runs[name] = [{"step": step + 1, "loss": loss} for step, loss in enumerate(losses)]
    plot_losses(runs, path)


if __name__ == "__main__":
    main(sys.argv[1])
