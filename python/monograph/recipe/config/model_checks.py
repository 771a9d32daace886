"""Checks of keys together: the model, its adapter, where that starts, and what servers load of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from typing import Any

from monograph.memory.base_memory.sizes import bytes_of
from monograph.ops.read_gguf import is_gguf
from monograph.recipe.config.base_bits import check_bits
from monograph.recipe.config.gguf_base import check_gguf, config_of_gguf
from monograph.recipe.config.key_row import Said, concerns
from monograph.recipe.config.keys import KEYS, Recipe, TrlRecipe
from monograph.recipe.config.placement import device_type
from monograph.recipe.config.recipe_file import NAME as REMEMBERED
from monograph.recipe.config.trl_checks import check_whole_model

# What PEFT calls the keys whose value adapter_config.json keeps as it was written.
PEFT_NAMES = {name: row.peft for name, row in KEYS.items() if row.peft}
ADAPTER_KEYS = tuple(name for name in KEYS if name.startswith(("lora_", "peft")) and name != "lora_model_dir")
OWN_ATTENTION = (
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "xformers",
    "sage",
    "sdpa_varlen",
    "kernels-community/",  # kernels of attention by their name on the Hub
)
QUANT_KWARGS = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


@concerns("base_model output_dir lora_model_dir adapter load_in_4bit load_in_8bit bf16 fp16")
def check_model(recipe: Recipe, said: Said) -> None:
    errors, notices = said.errors, said.notices
    if not recipe.base_model:
        errors.append("base_model: missing; write the folder of the model")
    elif (
        _looks_local(recipe.base_model)
        and not os.path.isfile(f"{recipe.base_model}/config.json")
        and not is_gguf(os.path.expanduser(recipe.base_model))
    ):
        made = recipe.output_dir
        known = os.path.isfile(os.path.join(made, REMEMBERED))
        hint = f"; {made} holds an adapter with its own recipe: write {made} for this file" if known else ""
        errors.append(
            f"base_model: {recipe.base_model} has no config.json; wanted the folder of a model or a GGUF file"
            f"{hint}"
        )
    start = recipe.lora_model_dir
    if start and _looks_local(start) and not os.path.isfile(f"{start}/adapter_config.json"):
        errors.append(f"lora_model_dir: {start} has no adapter_config.json; wanted the folder of an adapter")
    whole = recipe.adapter is None and isinstance(recipe, TrlRecipe)
    if isinstance(recipe, TrlRecipe):
        errors += check_whole_model(recipe)
    elif recipe.adapter is None:
        errors.append(
            "adapter: missing; only adapters are trained, the base stays frozen: write adapter: qlora; or "
            "trainer: trl, which trains the weights of a 16-bit base"
        )
    if whole and not errors:
        notices.append(
            "adapter: missing; the weights themselves are trained"
            + (", in bfloat16, which loses small changes; write bf16: false" if recipe.bf16 else "")
        )
    check_bits(recipe, said, bool(_json(recipe.base_model, "config.json").get("quantization_config")))
    if recipe.fp16 and recipe.bf16 in (True, "full"):
        errors.append(f"fp16 is true and bf16 {str(recipe.bf16).lower()}; write one of the two")


@concerns("base_memory shard_size fsdp fsdp_config device peft_init_lora_weights peft")
def check_base_memory(recipe: Recipe, said: Said) -> None:
    errors = said.errors
    if recipe.base_memory is None:
        return
    try:
        bytes_of(recipe.base_memory)
    except ValueError as error:
        errors.append(str(error))
    if recipe.shard_size is not None or recipe.fsdp or recipe.fsdp_config:
        errors.append(
            "base_memory and a sharded base (shard_size, fsdp): a rank holds its part in memory already; "
            "write one of the two"
        )
    if (kind := device_type(recipe)) != "cpu":
        errors.append(f"base_memory and the device {kind}: the base is mapped on a CPU; leave one out")
    start, _ = start_of(recipe)
    if isinstance(start, str) and start.startswith(("pissa", "loftq", "olora")):
        errors.append(
            f"base_memory and the start {start}: it makes a base of its own in memory; leave one out"
        )


@concerns("lora_target_parameters lora_dropout peft_use_dora peft_init_lora_weights")
def check_expert_targets(recipe: Recipe, said: Said) -> None:
    """What PEFT has not for LoRA on parameters."""
    errors = said.errors
    if not recipe.lora_target_parameters:
        return
    for name, value, wanted in (
        ("lora_dropout", recipe.lora_dropout, 0.0),
        ("peft_use_dora", recipe.peft_use_dora, False),
    ):
        if value != wanted:
            found = str(value).lower()
            errors.append(
                f"{name} is {found} and lora_target_parameters are given; PEFT wants {wanted} for them"
            )
    if isinstance(recipe.peft_init_lora_weights, str) and recipe.peft_init_lora_weights != "gaussian":
        errors.append(
            f"peft_init_lora_weights is {recipe.peft_init_lora_weights} and lora_target_parameters are "
            "given; their start is PEFT's own: leave it out"
        )


@concerns(
    "router_aux_loss_coef output_router_logits lora_target_linear lora_target_modules lora_target_parameters "
    "lora_model_dir adapter lora_modules_to_save peft_trainable_token_indices peft_ensure_weight_tying "
    "bnb_config_kwargs"
)
def check_targets(recipe: Recipe, said: Said) -> None:
    errors, notices = said.errors, said.notices
    if recipe.router_aux_loss_coef is not None and not recipe.output_router_logits:
        errors.append(
            f"router_aux_loss_coef is {recipe.router_aux_loss_coef} without output_router_logits; write "
            "output_router_logits: true, or leave both out"
        )
    targets = recipe.lora_target_linear or recipe.lora_target_modules or recipe.lora_target_parameters
    if not (targets or recipe.lora_model_dir or recipe.adapter is None):
        errors.append("lora_target_modules: missing; write lora_target_linear: true for all linear layers")
    trains_tables = recipe.lora_modules_to_save or recipe.peft_trainable_token_indices
    if recipe.peft_ensure_weight_tying and not (trains_tables or recipe.lora_target_modules):
        notices.append(
            "peft_ensure_weight_tying: ignored; neither embedding nor head is trained: write "
            "lora_modules_to_save: [embed_tokens, lm_head]"
        )
    for name, value in recipe.bnb_config_kwargs.items():
        if name not in QUANT_KWARGS:
            errors.append(f"bnb_config_kwargs.{name}: not supported; allowed are {', '.join(QUANT_KWARGS)}")
        elif name == "bnb_4bit_quant_type" and value not in ("nf4", "fp4"):
            errors.append(f"bnb_config_kwargs.{name} is {value!r}, wanted nf4 or fp4")
        elif name == "bnb_4bit_use_double_quant" and not isinstance(value, bool):
            errors.append(f"bnb_config_kwargs.{name} is {value!r}, wanted true or false")


@concerns("attn_implementation sample_packing eval_sample_packing device")
def check_attention(recipe: Recipe, said: Said) -> None:
    errors, notices = said.errors, said.notices
    kind = device_type(recipe)
    if kind not in ("cpu", "cuda") and recipe.attention == "monograph":
        packs = recipe.sample_packing or recipe.packs_evaluation
        notices.append(
            f"attn_implementation: on {kind} packed rows are computed with every score: bounded and slow"
            if packs
            else f"attn_implementation: monograph has no kernel on {kind}; sdpa is taken"
        )
    if recipe.attn_implementation.startswith(OWN_ATTENTION):
        notices.append(
            f"attn_implementation: {recipe.attn_implementation} is done by Monograph's own attention"
        )
    elif recipe.attn_implementation not in ("monograph", "sdpa", "eager"):
        errors.append(f"attn_implementation is {recipe.attn_implementation}, wanted monograph, sdpa or eager")
    elif recipe.attention != recipe.attn_implementation:
        notices.append(
            f"attn_implementation: {recipe.attn_implementation} would build a dense mask for packed rows; "
            "Monograph's own attention is taken"
        )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or os.path.exists(path)


@concerns("serve_with peft_use_dora lora_modules_to_save peft_trainable_token_indices")
def check_serving(recipe: Recipe, said: Said) -> None:
    if recipe.serve_with is not None:
        said.notices.extend(
            f"serve_with: {recipe.serve_with} cannot load {feature} from an adapter; merge it"
            for feature in features_not_served(recipe)
        )


def features_not_served(recipe: Recipe) -> list[str]:
    """What no server but PEFT loads from an adapter; `monograph adapter convert` takes care of the rest."""
    doubts = {
        "DoRA (peft_use_dora)": recipe.peft_use_dora,
        "whole layers (lora_modules_to_save)": bool(recipe.lora_modules_to_save),
        "trained tokens (peft_trainable_token_indices)": bool(recipe.peft_trainable_token_indices),
    }
    return [feature for feature, used in doubts.items() if used]


# PEFT writes the layers that it found, not the words they were asked for by.
_TARGETS = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")


@concerns(" ".join((*ADAPTER_KEYS, "lora_model_dir")))
def check_adapter_keys(recipe: Recipe, written: Collection[str]) -> tuple[list[str], list[str]]:
    """Errors and notices; `written` are the keys that the recipe has, be it with their defaults."""
    if recipe.lora_model_dir:
        return _beside_given_adapter(recipe, [name for name in ADAPTER_KEYS if name in written])
    if recipe.lora_target_linear and isinstance(recipe.lora_target_modules, str):
        return [
            f"lora_target_modules is the regular expression {recipe.lora_target_modules!r} and "
            "lora_target_linear true; wanted a list of names, which are taken besides all linear layers, or "
            "the expression alone"
        ], []
    return [], []


def _beside_given_adapter(recipe: Recipe, written: list[str]) -> tuple[list[str], list[str]]:
    """The adapter of lora_model_dir goes on as it is: other values are refused, those that cannot be compared
    are told."""
    config = given_config(recipe.lora_model_dir or "")
    errors, told = [], []
    for name in written:
        value = getattr(recipe, name)
        if name in PEFT_NAMES and config and _same(value, config.get(PEFT_NAMES[name])):
            continue
        if not value and name not in PEFT_NAMES:
            continue  # as if it were not there
        if name in _TARGETS or name not in PEFT_NAMES or not config:
            told.append(name)
        else:
            errors.append(
                f"{name} is {value!r}, and the adapter of lora_model_dir ({recipe.lora_model_dir}) has "
                f"{config.get(PEFT_NAMES[name])!r}, with which it goes on; leave {name} out"
            )
    notice = (
        f"{', '.join(told)}: ignored; the adapter of lora_model_dir goes on with its own layers and start"
    )
    return errors, [notice] if told else []


def given_config(folder: str) -> dict[str, Any]:
    """adapter_config.json of a local folder; empty for a name on the Hub or a file that is wrong, which
    loading names."""
    try:
        with open(os.path.join(os.path.expanduser(folder), "adapter_config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _same(written: Any, stored: Any) -> bool:
    if not written and not stored:  # null, false, [] and {} are one thing
        return True
    if isinstance(written, list) and isinstance(stored, list):
        return sorted(map(str, written)) == sorted(map(str, stored))
    if isinstance(written, str) and isinstance(stored, list):
        return [written] == stored
    return bool(written == stored)


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


@concerns("peft peft_init_lora_weights lora_model_dir base_model adapter merge_lora lora_r lora_rank_pattern")
def check_start(recipe: Recipe, said: Said) -> None:
    """All that is wrong with where the adapter starts."""
    said.errors += _start(recipe)


def _start(recipe: Recipe) -> list[str]:
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
    packed = recipe.adapter == "qlora" or bool(recipe.load_in_8bit) or packed_folder
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
    if is_gguf(os.path.expanduser(folder)):
        return config_of_gguf(os.path.expanduser(folder))
    try:
        with open(os.path.join(os.path.expanduser(folder), name), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


MODEL_CHECKS = (
    check_model,
    check_gguf,
    check_base_memory,
    check_expert_targets,
    check_targets,
    check_attention,
    check_start,
)
