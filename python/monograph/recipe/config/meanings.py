"""What keys say of other keys: those of other recipes are read as ours, with a notice.

What such a key asks for and is not here is refused by name. Rows of the table name these functions.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from monograph.recipe.config.check_value import checked
from monograph.recipe.config.key_row import Meaning


def _refused(error: str) -> Meaning:
    return Meaning({}, [], [error])


def _noticed(notice: str, **keys: Any) -> Meaning:
    return Meaning(keys, [notice], [])


def activation_offloading(value: Any, written: Mapping[str, Any]) -> Meaning:
    places = {True: "offload", "legacy": "offload", "hidden_states": "offload", "disk": "offload_disk"}
    if not isinstance(value, bool | str) or value not in places:
        return _refused(f"activation_offloading is {value!r}, wanted true, legacy, hidden_states or disk")
    if written.get("gradient_checkpointing") is not True:
        found = written.get("gradient_checkpointing", "missing")
        return _refused(
            f"activation_offloading: gradient_checkpointing is {str(found).lower()}, wanted true beside it; "
            f"or write gradient_checkpointing: {places[value]} alone"
        )
    return _noticed(
        f"activation_offloading: read as gradient_checkpointing: {places[value]}",
        gradient_checkpointing=places[value],
    )


_ROUTER = ("output_router_logits", "router_aux_loss_coef")


def model_config(value: Any, written: Mapping[str, Any]) -> Meaning:
    if not isinstance(value, dict):
        return _refused(f"model_config is {value!r}, wanted a mapping of {' and '.join(_ROUTER)}")
    errors = [
        f"model_config.{name}: not supported; edit config.json of the model's folder"
        for name in value
        if name not in _ROUTER
    ]
    errors += [
        f"model_config.{name} and {name} say the same thing in two ways; leave one out"
        for name in _ROUTER
        if name in value and written.get(name) is not None
    ]
    taken = {name: value[name] for name in _ROUTER if name in value}
    return Meaning(taken, [f"model_config.{name}: read as {name}" for name in taken], errors)


def model_quantization_config(value: Any, written: Mapping[str, Any]) -> Meaning:
    options = written.get("model_quantization_config_kwargs") or {}
    if value != "Mxfp4Config" or not isinstance(options, dict) or set(options) - {"dequantize"}:
        return _refused(
            "model_quantization_config: not supported; the folder says how it is quantised; "
            "`monograph inspect` shows it"
        )
    return _noticed(
        "model_quantization_config: Mxfp4Config is the format of the folder; its weights stay packed, and "
        "give the values that dequantize would"
    )


def quantization_kwargs(value: Any, written: Mapping[str, Any]) -> Meaning:
    if written.get("model_quantization_config"):
        return Meaning({}, [], [])  # looked at with it
    return _refused("model_quantization_config_kwargs: model_quantization_config is missing; leave it out")


# Names of trained parameters as PEFT has them, for the patterns below.
_ADAPTED = ("model.layers.0.mlp.up_proj.", "model.language_model.layers.0.mlp.up_proj.")


def of_adapted_layers(value: Any, written: Mapping[str, Any]) -> Meaning | None:
    """Beside an adapter: the adapted layers among those that are trained."""
    if not written.get("adapter") or not isinstance(value, list):
        return None
    try:
        whole = any(re.match(str(pattern), name) for pattern in value for name in _ADAPTED)
    except re.error:
        whole = False
    if not whole:
        return None
    return _noticed(
        f"unfrozen_parameters: ignored beside adapter: {written['adapter']}; the adapter of these layers is "
        "trained, and the base stays frozen"
    )


def _model_type(folder: str) -> str | None:
    """What config.json of a folder on this machine says; None if there is none."""
    try:
        with open(os.path.join(os.path.expanduser(folder), "config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found.get("model_type") if isinstance(found, dict) else None


def trust_remote_code(value: Any, written: Mapping[str, Any]) -> Meaning:
    kind = _model_type(str(written.get("base_model") or ""))
    if kind is not None:
        from transformers import CONFIG_MAPPING

        if kind not in CONFIG_MAPPING:
            return _refused(
                f"trust_remote_code: {written['base_model']} has model_type {kind!r}, which transformers "
                "does not know, and code from a model folder is never run; use a model that it knows"
            )
    return _noticed(
        "trust_remote_code: ignored; code from a model folder is never run: the class is transformers' own, "
        "and a model_type or tokenizer that it does not know is refused"
    )


def mistral_common(value: Any, written: Mapping[str, Any]) -> Meaning:
    return _noticed(
        "tokenizer_use_mistral_common: ignored; tokens are those of the folder's tokenizer.json and chat "
        "template, and a folder without them is refused"
    )


def checkpointing_inside(value: Any, written: Mapping[str, Any]) -> Meaning | None:
    """FSDP's checkpointing of activations is ours; the other entries stay (run_checks.py)."""
    names = ("activation_checkpointing", "fsdp_activation_checkpointing")
    asked = isinstance(value, dict) and any(value.get(name) for name in names)
    if not asked or written.get("gradient_checkpointing"):
        return None
    return _noticed(
        "fsdp_config.activation_checkpointing: read as gradient_checkpointing: true",
        fsdp_config=value,
        gradient_checkpointing=True,
    )


def loftq_base(value: Any, written: Mapping[str, Any]) -> Meaning | None:
    """LoftQ beside adapter: lora. What it leaves of the base is NF4, which adapter: qlora keeps packed."""
    asked = isinstance(value, dict) and value.get("loftq_config")
    if not asked or written.get("adapter") != "lora" or written.get("load_in_4bit"):
        return None
    return _noticed(
        "peft.loftq_config: LoftQ leaves a base in 4 bits, so adapter: lora is read as qlora",
        peft=value,
        adapter="qlora",
    )


_STAGE = re.compile(r"zero_?(?:stage_?)?([0123])")


def deepspeed(value: Any, written: Mapping[str, Any]) -> Meaning:
    """By the stage of ZeRO, which says what ranks share, and changes nothing of what is trained."""
    stage = None
    if isinstance(value, dict):
        stage = (value.get("zero_optimization") or {}).get("stage", 0)
    elif isinstance(value, str):
        try:
            with open(os.path.expanduser(value), encoding="utf-8") as file:
                stage = (json.load(file).get("zero_optimization") or {}).get("stage", 0)
        except (OSError, ValueError, AttributeError):
            found = _STAGE.search(os.path.basename(value))
            stage = int(found[1]) if found else None
    if stage not in (0, 1, 2, 3):
        return _refused(
            f"deepspeed: the stage of ZeRO is not known of {value!r:.60}; write shard_size to cut the "
            "base among ranks, or leave it out"
        )
    if stage == 3 and not (written.get("fsdp") or written.get("fsdp_config") or written.get("shard_size")):
        return _noticed(
            "deepspeed: ZeRO 3 is read as fsdp: the base is sharded across the ranks", fsdp="full_shard"
        )
    return _noticed(
        f"deepspeed: ignored; ZeRO {stage} cuts gradients and moments, which of an adapter are small: each "
        "rank has them"
    )


# `optim_args` of Monograph's own AdamW, and the keys that they are.
_NUMBERS = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}


def _arguments(written: str | dict[str, Any]) -> dict[str, Any]:
    """A mapping, or transformers' text `eps=1e-10,betas=[0.9,0.95]`."""
    if isinstance(written, dict):
        return written
    entries: dict[str, Any] = {}
    rest = written.replace(" ", "")
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals:
            raise ValueError(f"optim_args is {written!r}, wanted a mapping, or name=value,name=value")
        closing = {"[": "]", "(": ")"}.get(rest[:1])
        end = rest.find(closing) + 1 if closing else rest.find(",")
        value, rest = (rest, "") if end <= 0 else (rest[:end], rest[end:].lstrip(","))
        entries[name] = yaml.safe_load(value.replace("(", "[").replace(")", "]"))
    return entries


def take_optim_args(values: dict[str, Any], errors: list[str]) -> None:
    """Moves what optim_args says to the keys of AdamW's numbers, in place."""
    written = values.pop("optim_args", None)
    if not written:
        return
    try:
        entries = _arguments(written)
    except ValueError as error:
        errors.append(str(error))
        return
    for name, value in entries.items():
        if name not in _NUMBERS:
            errors.append(
                f"optim_args.{name}: the AdamW of the graph has {' and '.join(_NUMBERS)} alone; leave it "
                "out, or write trainer: trl beside it"
            )
            continue
        keys = _NUMBERS[name]
        try:
            numbers = (
                checked(value, list[float], f"optim_args.{name}")
                if name == "betas"
                else [checked(value, float, f"optim_args.{name}")]
            )
        except ValueError as error:
            errors.append(str(error))
            continue
        if len(numbers) != len(keys):
            errors.append(f"optim_args.{name} is {value!r}, wanted {len(keys)} numbers")
            continue
        for key, number in zip(keys, numbers, strict=True):
            if key in values:
                errors.append(f"{key} and optim_args.{name} say the same thing in two ways; leave one out")
            values[key] = number
