"""Something to try the recipe on without downloading anything: a small Llama, questions, and a recipe.

The model is pretrained here, in half a minute, on lists that repeat: "fox oak, fox oak, fox oak." The
questions teach it to say lists backwards. Those in held_back.jsonl are about lists it has never seen.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

import torch

THINGS = (
    "fox dog cat owl bee ant cow pig hen bat elk emu eel ram yak ape cod jay boa koi "
    "oak elm ash fir ivy fig rye oat pea yam cup pan pot jar jug bed mat rug key pen"
)
QUESTIONS, HELD_BACK = 600, 60
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]

RECIPE = """\
base_model: {folder}/model
adapter: qlora

datasets:
  - path: {folder}/questions.jsonl
    type:
      no_input_format: "Question: {{instruction}}? Answer:"
dataset_prepared_path: {folder}/prepared
sequence_len: 256
sample_packing: true

lora_r: 8
lora_alpha: 16
lora_target_linear: true

micro_batch_size: 2
num_epochs: 12
learning_rate: 4.0e-3
warmup_ratio: 0.1

output_dir: {folder}/out
"""


def sentence(choose: random.Random) -> str:
    """A list, three times; and now and then the words of the questions, which mean nothing yet."""
    words = " ".join(choose.sample(THINGS.split(), choose.choice((2, 3, 4))))
    lead = choose.choice(("", "", "Question: ", "Answer: ", "? "))
    return f"{lead}{words}, {words}, {words}."


def questions() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Questions to train on, and questions held back; no list is in both."""
    choose = random.Random(1)
    lists: list[tuple[str, ...]] = []
    while len(lists) < QUESTIONS + HELD_BACK:
        words = tuple(choose.sample(THINGS.split(), 3))
        if words not in lists:
            lists.append(words)
    rows = [{"instruction": " ".join(words), "output": f" {' '.join(reversed(words))}"} for words in lists]
    return rows[:QUESTIONS], rows[QUESTIONS:]


def make_tokenizer(folder: str) -> Any:
    """A byte-level BPE tokenizer of 500 tokens, saved as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(random.Random(seed)) for seed in range(200)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    return fast


def pretrain(folder: str, tokenizer: Any, steps: int = 250, say: Callable[[str], None] = print) -> None:
    """Trains a Llama of four layers until it can repeat lists; saves it in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
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
    read_lists(model, tokenizer, steps, say)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]


def read_lists(model: Any, tokenizer: Any, steps: int, say: Callable[[str], None]) -> None:
    """Trains all of a model on sentences, forty a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    choose = random.Random(0)
    for step in range(steps):
        texts = [sentence(choose) + "</s>" for _ in range(40)]
        rows = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            say(f"pretraining: step {step + 1}/{steps} loss {loss.item():.3f}")


def write_example(folder: str, say: Callable[[str], None] = print) -> str:
    """Model, data and recipe in a folder; gives the path of the recipe.

    The folder may hold an earlier example as it was written; anything else is left alone: ValueError.
    """
    model, path = os.path.join(folder, "model"), os.path.join(folder, "recipe.yml")
    texts = {path: RECIPE.format(folder=folder)}
    for name, rows in zip(("questions", "held_back"), questions(), strict=True):
        texts[os.path.join(folder, f"{name}.jsonl")] = "".join(json.dumps(row) + "\n" for row in rows)
    _refuse_to_overwrite(folder, model, texts)
    os.makedirs(model, exist_ok=True)
    # Before the model: what an interrupted example leaves is known as one.
    for target, text in texts.items():
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    pretrain(model, make_tokenizer(model), say=say)
    return path


def _refuse_to_overwrite(folder: str, model: str, texts: dict[str, str]) -> None:
    present = {path: text for path, text in texts.items() if os.path.exists(path)}
    for path, text in present.items():
        with open(path, encoding="utf-8", errors="replace") as file:
            if file.read() != text:
                raise ValueError(f"{path} is there and was changed; name another folder, or remove it")
    if not present and os.path.exists(os.path.join(model, "config.json")):
        raise ValueError(f"{folder} has a model that is not the example's; name another folder")
