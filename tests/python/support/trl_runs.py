"""A tiny packed model and TRL's three trainers over it."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

import monograph as mg
from support.tiny_models import tiny_llama

WORDS = [f"w{i}" for i in range(60)]
TEXTS = [" ".join(WORDS[(7 * i + j) % 60] for j in range(12)) for i in range(8)]
ROWS = {
    "sft": {"text": TEXTS},
    "dpo": {
        "prompt": [text + " " for text in TEXTS],
        "chosen": [" ".join(WORDS[i : i + 9]) for i in range(8)],
        "rejected": [" ".join(WORDS[i + 20 : i + 27]) for i in range(8)],
    },
    "grpo": {"prompt": TEXTS},
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_folder(root: pathlib.Path, layers: int = 2) -> pathlib.Path:
    """A tiny Llama with NF4 weights in bitsandbytes' own files."""
    model = tiny_llama(
        intermediate_size=128,
        num_hidden_layers=layers,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,  # logits far enough from uniform to matter
    )
    model.save_pretrained(root / "dense")
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        root / "dense", quantization_config=mg.MonographConfig("nf4", double_quant=True), dtype=torch.float32
    )
    packed.save_pretrained(root / "nf4")
    tokenizer().save_pretrained(root / "nf4")
    return root / "nf4"


def variety(completions: Any, **_: Any) -> list[float]:
    """A reward that two different completions hardly share."""
    return [
        sum(0.01 * i * WORDS.index(w) for i, w in enumerate(c.split(), 1) if w in WORDS) for c in completions
    ]


def trainer_for(kind: str, model: Any, output: str, **change: Any) -> Any:
    config, trainer, options = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, {"max_length": 16}),
        "dpo": (trl.DPOConfig, trl.DPOTrainer, {"max_length": 24}),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer, {"num_generations": 2, "max_completion_length": 6}),
    }[kind]
    arguments = {
        "output_dir": str(output),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 0,
    }
    rewards = {"reward_funcs": variety} if kind == "grpo" else {}
    torch.manual_seed(0)
    return trainer(
        model=model,
        args=config(**arguments | options | change),
        train_dataset=Dataset.from_dict(ROWS[kind]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        **rewards,
    )
