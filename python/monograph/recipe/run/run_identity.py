"""What defines a run: recorded in its checkpoints, compared when it is resumed.

Every key is compared unless its row says that another value is free, or told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from monograph.ops.show_config import chosen_isa
from monograph.recipe.config.key_row import TOLD
from monograph.recipe.config.keys import KEYS, Recipe
from monograph.recipe.config.model_checks import PEFT_NAMES, given_config
from monograph.recipe.config.placement import written_device
from monograph.recipe.data.prepare import data_keys, files_sha256

_INSTRUCTION_SET = "instruction set"  # of the kernels: sums have another order on another one


def kernels_identity(recipe: Recipe) -> dict[str, str]:
    """What of the machine decides the bits. Told when it differs: a run may go on elsewhere."""
    return {_INSTRUCTION_SET: chosen_isa()} if written_device(recipe) == "cpu" else {}


def run_identity(recipe: Recipe, tokens_sha256: str | None = None) -> dict[str, Any]:
    """The keys that define a run and those that are told, with values as JSON has them; and the tokens it
    is trained on: a tokenizer or its chat template may have changed in its folder."""
    keys = asdict(recipe) | data_keys(recipe)
    identity = {name: keys[name] for name in KEYS if KEYS[name].resume.state != "free"}
    identity["step_mode"] = recipe.mode
    identity["virtual_shards"] = recipe.leaves  # of the number of ranks nothing depends
    if recipe.max_steps == -1:  # no bound, as None
        identity["max_steps"] = None
    del identity["bf16"]  # named after fp16, which decides it
    identity["bf16"] = bool(recipe.bf16) and not recipe.fp16  # auto, full and true are one thing
    options = recipe.bnb_config_kwargs
    if recipe.adapter == "qlora":
        identity["bnb_4bit_quant_type"] = options.get("bnb_4bit_quant_type", "nf4")
        identity["bnb_4bit_use_double_quant"] = options.get("bnb_4bit_use_double_quant", True)
    if recipe.load_in_8bit:
        identity["adapter"] = (
            f"{recipe.adapter} with load_in_8bit"  # a checkpoint without it has another base
        )
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
        if name != _INSTRUCTION_SET and (name not in KEYS or KEYS[name].resume is not TOLD):
            raise ValueError(
                f"resume_from_checkpoint: {name} is {present[name]!r}, the run of {checkpoint} has "
                f"{saved[name]!r}; write that, or begin anew in another output_dir"
            )
    bits = {_INSTRUCTION_SET: ": the bits are not those of an unbroken run"}
    return [
        f"{name} is {present[name]!r} from here on, was {saved[name]!r}{bits.get(name, '')}"
        for name in different
    ]
