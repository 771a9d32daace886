"""What recipe tests run on: a tokenizer trained on the spot, data files, and small Llama folders."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request. ### Instruction: Input: Response: "
    "the quick brown fox jumps over the lazy dog and answers questions about numbers "
    "system user assistant What is your name? My name is Ada. 0 1 2 3 4 5 6 7 8 9\n"
)
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(
    folder: str | pathlib.Path,
    texts: Iterable[str] = (),
    vocab_size: int = 400,
    chat_template: str | None = None,
) -> Any:
    """A byte-level BPE tokenizer of 400 tokens with bos in front, saved as transformers does."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS, *texts], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def make_model(folder: str | pathlib.Path, vocab_size: int = 400, seed: int = 0, **config: Any) -> Any:
    """A Llama of two layers with random weights, saved with its tokenizer's special tokens."""
    import torch

    from support.tiny_models import tiny_llama

    sizes = {"intermediate_size": 128, "max_position_embeddings": 512, "tie_word_embeddings": False}
    tokens = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = tiny_llama(seed=seed, dtype=torch.bfloat16, **(sizes | tokens | config))
    model.save_pretrained(folder)
    return model


def write_jsonl(path: pathlib.Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_instruction_world(root: pathlib.Path) -> pathlib.Path:
    """What small_recipe(root, "instruction") reads: a model with its tokenizer, and forty instructions."""
    make_tokenizer(root / "model")
    make_model(root / "model")
    rows = [{"instruction": f"What is {n}?", "output": f"{n} dog {n % 7}"} for n in range(40)]
    write_jsonl(root / "train.jsonl", rows)
    return root


def small_recipe(root: pathlib.Path, kind: str, **change: Any) -> dict[str, Any]:
    """What recipe tests share: LoRA on root/model, packed rows of 64 tokens from root/train.jsonl."""
    base: dict[str, Any] = {
        "base_model": str(root / "model"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "lora_r": 4,
        "datasets": [{"path": str(root / "train.jsonl"), "type": kind}],
        "dataset_prepared_path": str(root / "prepared"),
        "sequence_len": 64,
        "sample_packing": True,
        "learning_rate": 0.01,
    }
    return base | change


def errors_of(keys: Mapping[str, Any]) -> Sequence[str]:
    """All that is wrong with these keys; fails if they are right."""
    from monograph.recipe import ConfigError, check_keys

    try:
        check_keys(keys)
    except ConfigError as error:
        return error.errors
    raise AssertionError("the keys are accepted")
