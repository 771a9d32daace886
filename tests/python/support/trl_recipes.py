"""Recipes that TRL trains, and the same runs written as plain scripts with TRL's own API."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import monograph as mg
from monograph.recipe import check_keys
from monograph.recipe.train import train
from support.trl_runs import tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PROMPTS = [f"w{3 * i} w{3 * i + 1}" for i in range(16)]
ANSWERS = [f"w{i + 40} w{i + 41} w{i + 42}" for i in range(16)]
OTHERS = [f"w{50 - i} w{20 - i} w{i}" for i in range(16)]


def asked(texts: list[str]) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


def answered(texts: list[str]) -> list[Any]:
    return [[{"role": "assistant", "content": text}] for text in texts]


CHAT_ROWS: dict[str, list[Any]] = {
    "prompt": asked(PROMPTS),
    "chosen": answered(ANSWERS),
    "rejected": answered(OTHERS),
}
LABELLED: dict[str, list[Any]] = {
    "prompt": [text + " " for text in PROMPTS],
    "completion": [a if i % 2 else b for i, (a, b) in enumerate(zip(ANSWERS, OTHERS, strict=True))],
    "label": [bool(i % 2) for i in range(16)],
}
GRPO = {"num_generations": 8, "max_completion_length": 6, "temperature": 0.9}


def rewards_high(completions: Any, **_: Any) -> list[float]:
    """The share of words from w30 on."""
    words = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(number >= 30 for number in numbers) / max(len(numbers), 1) for numbers in words]


def write_rows(path: pathlib.Path, **columns: Any) -> str:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trl_keys(
    folder: str | pathlib.Path,
    root: pathlib.Path,
    path: str | pathlib.Path,
    kind: str | dict[str, str],
    **change: Any,
) -> dict[str, Any]:
    """A recipe in float32 with a short run; `rl` or `trainer` are for the caller."""
    keys = {
        "base_model": str(folder),
        "adapter": "qlora",
        "bf16": False,
        "lora_target_linear": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "datasets": [{"path": path, "type": kind}],
        "dataset_prepared_path": str(root / "prepared"),
        "sequence_len": 16,
        "pad_to_sequence_len": True,
        "micro_batch_size": 4,
        "max_steps": 12,
        "learning_rate": 0.02,
        "lr_scheduler": "constant",
        "output_dir": str(root / "out"),
        "save_strategy": "no",
        "seed": 3,
    }
    return keys | change


def sft_keys(folder: str | pathlib.Path, root: pathlib.Path, **change: Any) -> dict[str, Any]:
    path = write_rows(root / "sft.jsonl", instruction=PROMPTS, output=ANSWERS)
    kind = {"no_input_format": "{instruction} "}
    return trl_keys(folder, root, path, kind, **{"trainer": "trl"} | change)


def run_recipe(keys: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run."""
    outcome = train(check_keys(keys).recipe)
    with open(f"{outcome.output_dir}/metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def causal(folder: str | pathlib.Path) -> tuple[Any, str]:
    return mg.from_pretrained(folder, dtype=torch.float32), "CAUSAL_LM"


def classifier(folder: str | pathlib.Path) -> tuple[Any, str]:
    """What RewardTrainer makes of a folder by itself, on packed weights."""
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    transformers.set_seed(3)
    auto = transformers.AutoModelForSequenceClassification
    return mg.from_pretrained(folder, dtype=torch.float32, config=config, model_class=auto), "SEQ_CLS"


def run_script(
    kind: str,
    folder: str | pathlib.Path,
    root: pathlib.Path,
    rows: dict[str, list[Any]],
    load: Any = causal,
    prepare: Any = None,
    optimized: bool = True,
    **change: Any,
) -> list[dict[str, Any]]:
    """The same by TRL's own API: what a person would write, with Monograph's two lines, and `prepare`.

    optimized=False: without the second one, for a dense model that `load` gives.
    """
    config, trainer_class = {
        "sft": (trl.SFTConfig, trl.SFTTrainer),
        "dpo": (trl.DPOConfig, trl.DPOTrainer),
        "kto": (trl.KTOConfig, trl.KTOTrainer),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "reward_model": (trl.RewardConfig, trl.RewardTrainer),
        "orpo": (ORPOConfig, ORPOTrainer),
        "simpo": (CPOConfig, CPOTrainer),
    }[kind]
    extra = {"reward_funcs": [rewards_high]} if kind == "grpo" else {}
    length = {} if kind == "grpo" else {"max_length": 16}
    options: dict[str, Any] = {
        "output_dir": str(root / "script"),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
    }
    if kind not in ("orpo", "simpo"):
        options["pad_to_multiple_of"] = 16
    words = tokenizer()
    words.chat_template = TEMPLATE
    model, task = load(folder)
    trainer = trainer_class(
        model=model,
        args=config(**options | length | change),
        train_dataset=Dataset.from_dict(rows),
        processing_class=words,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task),
        **extra,
    )
    if optimized:
        mg.optimize(trainer.model)
    if prepare:
        prepare(trainer)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def columns(lines: Any, *names: Any) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in lines if "loss" in line]


@contextlib.contextmanager
def counted_graphs(counters: Any, dynamo: Any) -> Iterator[dict[str, Any]]:
    """Graphs (a recompile is one more) and breaks of what is compiled inside, known at its end."""
    found: dict[str, Any] = {}
    dynamo.reset()
    counters.clear()
    yield found
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["breaks"] = sum(counters["graph_break"].values())
    dynamo.reset()
