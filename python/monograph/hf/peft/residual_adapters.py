"""Adapters that changed their packed base (lora_start.py) in the calls of PEFT and transformers.

PEFT can save such an adapter as an ordinary one of twice the rank, which a requantised base does not allow,
and first rewrites the config of the folder that it reads. It ignores tensors of a file that it does not
expect. Its hotswap, and transformers, copy tensor by tensor, past the layer that makes the residual.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from monograph.hf.peft.lora_start import (
    RESIDUAL,
    StartedLora,
    holds_a_start,
    start_without_residual,
)
from monograph.upstream.peft_names import hotswap_from_state_dict, replace_hotswap

_CONVERSION = "path_initial_model_for_weight_conversion"

_peft_model: Any = PeftModel
_transformers_model: Any = PreTrainedModel
# before they are replaced
_save = _peft_model.save_pretrained
_load = _peft_model.load_adapter
_load_into_transformers = _transformers_model.load_adapter
_swap = hotswap_from_state_dict
_save_signature = inspect.signature(_save)


def install() -> None:
    _peft_model.save_pretrained = _save_unconverted
    _peft_model.load_adapter = _load_whole
    _transformers_model.load_adapter = _load_ordinary
    replace_hotswap(_swap_ordinary)


@functools.wraps(_save)
def _save_unconverted(model: Any, *arguments: Any, **options: Any) -> Any:
    given = _save_signature.bind_partial(model, *arguments, **options).arguments
    if given.get(_CONVERSION) is not None:
        for layer in model.modules():
            if isinstance(layer, StartedLora) and layer.residual_of is not None:
                raise ValueError(
                    f"{_CONVERSION} is {given[_CONVERSION]!r}, wanted None: adapter {layer.residual_of!r} "
                    "left a requantised base, to which no LoRA of twice the rank is the difference; save it "
                    "as it is, or merge_and_unload"
                )
    return _save(model, *arguments, **options)


@functools.wraps(_load)
def _load_whole(model: Any, *arguments: Any, **options: Any) -> Any:
    result = _load(model, *arguments, **options)
    _refuse_a_lost_start(result.unexpected_keys)
    return result


@functools.wraps(_load_into_transformers)
def _load_ordinary(model: Any, *arguments: Any, **options: Any) -> Any:
    info = _load_into_transformers(model, *arguments, **options)
    _refuse_a_lost_start(info.unexpected_keys)
    for name, layer in model.named_modules():
        if isinstance(layer, StartedLora) and layer.awaits_start:
            raise ValueError(
                f"{name}: adapter {layer.residual_of!r} has changed its packed base ({RESIDUAL}), which "
                "load_adapter of transformers does not make again: load the base anew, then "
                "PeftModel.from_pretrained(base, FOLDER)"
            )
    return info


@functools.wraps(_swap)
def _swap_ordinary(
    model: Any, state_dict: Any, adapter_name: str, config: Any, *arguments: Any, **options: Any
) -> Any:
    for layer in model.modules():
        if isinstance(layer, StartedLora) and layer.residual_of == adapter_name:
            raise ValueError(
                f"hotswap: adapter {adapter_name!r} has changed its packed base; load the base anew"
            )
    for key in state_dict:
        if holds_a_start(key):
            raise ValueError(
                f"hotswap: {key}: the new adapter has changed its packed base; load the base anew"
            )
    return _swap(model, state_dict, adapter_name, config, *arguments, **options)


def _refuse_a_lost_start(unexpected: Any) -> None:
    for key in sorted(unexpected):
        if holds_a_start(key):
            raise ValueError(start_without_residual(key))
