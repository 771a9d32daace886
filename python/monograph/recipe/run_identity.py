"""What defines a run: recorded in its checkpoints, compared when it is resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from monograph.recipe.keys import Recipe
from monograph.recipe.prepare import data_keys, files_sha256

# Another value is another run: another adapter, other rows, other moments.
_ADAPTER_KEYS = (
    "adapter lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules lora_modules_to_save "
    "lora_rank_pattern lora_alpha_pattern peft_use_rslora peft_use_dora peft_layers_to_transform "
    "peft_layers_pattern peft_init_lora_weights peft peft_trainable_token_indices peft_ensure_weight_tying"
)
_ROW_KEYS = "sample_packing shuffle_merged_datasets micro_batch_size gradient_accumulation_steps"
_UPDATE_KEYS = "weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm"

# Another value changes what comes, not what was: a person may want it, and is told.
_TOLD_KEYS = (
    "learning_rate lr_scheduler cosine_min_lr_ratio warmup_ratio warmup_steps num_epochs max_steps "
    "attn_implementation step_mode"
)

# What PEFT calls the keys of an adapter.
_PEFT_NAMES = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "peft_trainable_token_indices": "trainable_token_indices",
    "peft_ensure_weight_tying": "ensure_weight_tying",
}


def run_identity(recipe: Recipe) -> dict[str, Any]:
    """The keys that define a run and those that are told, with values as JSON has them."""
    keys = asdict(recipe)
    names = f"{_ADAPTER_KEYS} {_ROW_KEYS} {_UPDATE_KEYS} {_TOLD_KEYS}".split()
    identity = {name: keys[name] for name in names} | data_keys(recipe)
    identity["step_mode"] = recipe.mode
    identity["virtual_shards"] = recipe.leaves  # of the number of ranks nothing depends
    identity["fp16"] = recipe.fp16
    identity["bf16"] = bool(recipe.bf16) and not recipe.fp16  # auto, full and true are one thing
    options = recipe.bnb_config_kwargs
    if recipe.adapter == "qlora":
        identity["bnb_4bit_quant_type"] = options.get("bnb_4bit_quant_type", "nf4")
        identity["bnb_4bit_use_double_quant"] = options.get("bnb_4bit_use_double_quant", True)
    if recipe.lora_model_dir:  # the shape of the adapter is that of the one it starts from
        identity |= _started_from(recipe.lora_model_dir)
    # Files may be moved; what is in them counts. What is evaluated on may change.
    del identity["test_datasets"]
    for entry in identity["datasets"]:
        for name in ("path", "data_files"):
            entry.pop(name)
    identity["files of datasets"] = files_sha256(recipe.datasets)
    for name in ("lora_target_modules", "lora_modules_to_save"):
        if isinstance(identity[name], list):
            identity[name] = sorted(identity[name])
    return json.loads(json.dumps(identity))


def _started_from(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
        config = json.load(file)
    return {key: config.get(name) for key, name in _PEFT_NAMES.items()}


def compare(saved: Mapping[str, Any], present: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Raises if a checkpoint is of another run, and names the key; else gives what is to be told.

    A key that the checkpoint does not know is passed over: it was written before the key was there.
    """
    different = [name for name in present if name in saved and saved[name] != present[name]]
    for name in different:
        if name not in _TOLD_KEYS.split():
            raise ValueError(
                f"resume_from_checkpoint: {name} is {present[name]!r}, the run of {checkpoint} has "
                f"{saved[name]!r}; write that, or begin anew in another output_dir"
            )
    return [f"{name} is {present[name]!r} from here on, was {saved[name]!r}" for name in different]
