"""`peft_init_lora_weights` and `peft.loftq_config`: what is wrong with them, before a model is loaded."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from monograph.recipe.config.adapter_keys import given_config
from monograph.recipe.config.keys import Recipe

_PLAIN = ("gaussian", "orthogonal", "mica")  # these leave the base as it is
_MERGED = ("gaussian", "orthogonal")  # as `monograph merge` knows them
_WANTED = f"true, false, {', '.join(_PLAIN)}, pissa, pissa_niter_N or loftq"
_KEY = "peft_init_lora_weights"

# What a recipe has no way to give them.
_NEED_DATA = {
    "eva": (
        "EVA needs batches of data; in Python: mg.add_lora with LoraConfig(init_lora_weights='eva'), "
        "peft.initialize_lora_eva_weights(model, dataloader), save_pretrained, and lora_model_dir here"
    ),
    "corda": "CorDA needs data and subtracts its part from the base; write pissa",
    "lora_ga": "LoRA-GA needs gradients and subtracts its part from the base; write pissa",
}


def start_of(recipe: Recipe) -> tuple[bool | str, dict[str, int]]:
    """PEFT's init_lora_weights and loftq_config; as in axolotl, a loftq_config alone means `loftq`."""
    loftq = recipe.peft.get("loftq_config") or {}
    start = recipe.peft_init_lora_weights
    if loftq and start is True:
        start = "loftq"
    start = start.lower() if isinstance(start, str) else start
    return start, {"loftq_bits": 4, "loftq_iter": 1, **loftq} if start == "loftq" else {}


def check_start_keys(recipe: Recipe) -> list[str]:
    """All that is wrong with where the adapter starts."""
    errors = _check_loftq_keys(recipe)
    if errors:
        return errors
    if recipe.lora_model_dir:
        return _check_given_adapter(recipe)
    start, loftq = start_of(recipe)
    if recipe.peft.get("loftq_config") and start != "loftq":
        return [f"{_KEY} is {start!r} and peft.loftq_config is written; leave one out"]
    if not isinstance(start, str):
        return []
    return _check_value(recipe, start, loftq)


def _check_value(recipe: Recipe, start: str, loftq: dict[str, int]) -> list[str]:
    packed_folder = bool(_json(recipe.base_model, "config.json").get("quantization_config"))
    packed = recipe.adapter == "qlora" or packed_folder
    if start in _NEED_DATA:
        return [f"{_KEY}: {start} is not supported; {_NEED_DATA[start]}"]
    if start == "olora" and packed:
        return [f"{_KEY}: olora subtracts its part from the base, which is quantised; write pissa"]
    if start not in (*_PLAIN, "pissa", "olora", "loftq") and not re.fullmatch(r"pissa_niter_[1-9]\d*", start):
        return [f"{_KEY} is {start!r}, wanted {_WANTED}"]
    if start == "orthogonal" and (odd := _odd_ranks(recipe)):
        return [f"{_KEY} is orthogonal, which wants even ranks; found {', '.join(odd)}"]
    if start == "loftq" and (recipe.adapter != "qlora" or packed_folder):
        found = "base_model is quantised already" if packed_folder else f"adapter is {recipe.adapter}"
        return [
            f"{_KEY}: loftq makes up for the error of quantising, so it wants adapter: qlora and a base in "
            f"16 bits; {found}"
        ]
    if recipe.merge_lora and start not in _MERGED and loftq.get("loftq_iter") != 1:
        how = f"{start} with loftq_iter {loftq['loftq_iter']}" if loftq else start
        return [_not_merged(f"{_KEY} is {how}")]
    return []


def _check_loftq_keys(recipe: Recipe) -> list[str]:
    errors = [
        f"peft.{name}: not supported; wanted loftq_config" for name in recipe.peft if name != "loftq_config"
    ]
    loftq = recipe.peft.get("loftq_config")
    if loftq is None:
        return errors
    if not isinstance(loftq, dict):
        return [*errors, f"peft.loftq_config is {loftq!r}, wanted loftq_bits: 4 below it"]
    for name, value in loftq.items():
        if name not in ("loftq_bits", "loftq_iter"):
            errors.append(f"peft.loftq_config.{name}: unknown; wanted loftq_bits or loftq_iter")
        elif name == "loftq_bits" and value != 4:
            errors.append(f"peft.loftq_config.loftq_bits is {value!r}, wanted 4: adapter: qlora has 4 bits")
        elif name == "loftq_iter" and (type(value) is not int or value < 1):
            errors.append(f"peft.loftq_config.loftq_iter is {value!r}, wanted 1 or more")
    return errors


def _check_given_adapter(recipe: Recipe) -> list[str]:
    """lora_model_dir goes on with the start of its adapter."""
    start = given_config(recipe.lora_model_dir or "").get("init_lora_weights")
    if recipe.merge_lora and isinstance(start, str) and start not in _MERGED:
        return [_not_merged(f"lora_model_dir: its init_lora_weights is {start}")]
    return []


def _not_merged(what: str) -> str:
    return (
        f"{what}, and merge_lora is true: `monograph merge` refuses such an adapter; leave merge_lora out, "
        "and merge in Python: PeftModel.merge_and_unload()"
    )


def _odd_ranks(recipe: Recipe) -> list[str]:
    ranks = {"lora_r": recipe.lora_r} | {
        f"lora_rank_pattern.{name}": rank for name, rank in recipe.lora_rank_pattern.items()
    }
    return [f"{name} {rank}" for name, rank in ranks.items() if rank % 2]


def _json(folder: str, name: str) -> dict[str, Any]:
    """A file of a local folder; empty for a name on the Hub or a file that is wrong, which loading names."""
    try:
        with open(os.path.join(os.path.expanduser(folder), name), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
