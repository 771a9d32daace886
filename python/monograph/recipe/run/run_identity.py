"""What defines a run: recorded in its checkpoints, compared when it is resumed.

Every key of a recipe is compared unless it stands in one of the two tables here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from monograph.recipe.config.adapter_keys import PEFT_NAMES, given_config
from monograph.recipe.config.keys import KEYS, Recipe
from monograph.recipe.data.prepare import data_keys, files_sha256

# Another value changes what comes, not what was: a person may want it, and is told.
_TOLD_KEYS = (
    "learning_rate lr_scheduler cosine_min_lr_ratio warmup_ratio warmup_steps num_epochs max_steps "
    "attn_implementation step_mode pad_to_sequence_len"
)

# May change freely, and why.
FREE = {
    "a checkpoint of TRL's trainers is another thing": "trainer rl reward_model",
    "the hash of the base is compared": "base_model revision_of_model another_base",
    "the tokens themselves are compared": "tokenizer_config",
    "its adapter is in the checkpoint": "lora_model_dir",
    "all names that are accepted are one AdamW": "optimizer",
    "every place and every division gives the same bits": (
        "device device_map base_memory gradient_checkpointing offload_folder shard_size replicate_size "
        "fsdp_version fsdp_config fsdp ddp_timeout"
    ),
    "step_mode stands for it": "torch_compile torch_compile_mode torch_compile_options",
    "written in another way below": "load_in_4bit bnb_config_kwargs",
    "what is evaluated on, and when, changes no step": (
        "test_datasets eval_sample_packing eval_batch_size evals_per_epoch eval_steps"
    ),
    "where and when things are written or stopped": (
        "output_dir dataset_prepared_path dataset_processes logging_steps saves_per_epoch save_steps "
        "save_total_limit save_first_step load_best_model_at_end early_stopping_patience "
        "loss_watchdog_threshold loss_watchdog_patience max_bad_steps resume_from_checkpoint "
        "auto_resume_from_checkpoints report_to wandb_project wandb_name wandb_entity use_wandb "
        "use_tensorboard merge_lora calibration serve_with"
    ),
}
_FREE_KEYS = frozenset(" ".join(FREE.values()).split())


def run_identity(recipe: Recipe, tokens_sha256: str | None = None) -> dict[str, Any]:
    """The keys that define a run and those that are told, with values as JSON has them; and the tokens it
    is trained on: a tokenizer or its chat template may have changed in its folder."""
    keys = asdict(recipe) | data_keys(recipe)
    identity = {name: keys[name] for name in KEYS if name not in _FREE_KEYS}
    identity["step_mode"] = recipe.mode
    identity["virtual_shards"] = recipe.leaves  # of the number of ranks nothing depends
    del identity["bf16"]  # named after fp16, which decides it
    identity["bf16"] = bool(recipe.bf16) and not recipe.fp16  # auto, full and true are one thing
    options = recipe.bnb_config_kwargs
    if recipe.adapter == "qlora":
        identity["bnb_4bit_quant_type"] = options.get("bnb_4bit_quant_type", "nf4")
        identity["bnb_4bit_use_double_quant"] = options.get("bnb_4bit_use_double_quant", True)
    if recipe.lora_model_dir:  # the shape of the adapter is that of the one it starts from
        config = given_config(recipe.lora_model_dir)
        identity |= {key: config.get(name) for key, name in PEFT_NAMES.items()}
    # Files may be moved; what is in them counts.
    for entry in identity["datasets"]:
        for name in ("path", "data_files"):
            entry.pop(name)
    identity["files of datasets"] = files_sha256(recipe.datasets)
    for name in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
        if isinstance(identity[name], list):
            identity[name] = sorted(identity[name])
    if tokens_sha256 is not None:  # last: a key that makes other tokens is named before them
        identity["tokens of datasets"] = tokens_sha256
    return json.loads(json.dumps(identity))


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
