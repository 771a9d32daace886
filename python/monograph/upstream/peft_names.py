"""Private names of PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monograph.upstream.private_name import PrivateName, loads_on_use

if TYPE_CHECKING:  # a base class must be known to the type checker
    from peft.tuners.lora.layer import Linear as PeftLinear
    from peft.tuners.lora.layer import ParamWrapper

    __all__ = ["ParamWrapper", "PeftLinear"]

_READ = "0.21.2"
_LAYER = "peft.tuners.lora.layer:Linear"
_DISPATCH = "PEFT's own calls make our layer over a QuantLinear"
_OURS = "LoraLinear: fused arithmetic under PEFT's names"

NAMES = {
    "PeftLinear": PrivateName(_LAYER, _READ, "optimize: the layer whose class is changed"),
    "PeftLinear4bit": PrivateName(
        "peft.tuners.lora.bnb:Linear4bit", _READ, "optimize: the layer over bitsandbytes', likewise"
    ),
    "ParamWrapper": PrivateName(
        "peft.tuners.lora.layer:ParamWrapper", _READ, "target_parameters: the wrapper whose class is changed"
    ),
    "parameter_name": PrivateName(
        "peft.tuners.lora.layer:ParamWrapper().parameter_name", _READ, "target_parameters: which weight"
    ),
    "check_forward_args": PrivateName(
        "peft.tuners.lora.layer:ParamWrapper._check_forward_args", _READ, "target_parameters: refuses as PEFT"
    ),
    "convert_config": PrivateName(
        "peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",
        _READ,
        "add_lora: what all-linear means where experts are fused",
    ),
    "include_all_linear": PrivateName(
        "peft.tuners.tuners_utils:_maybe_include_all_linear_layers",
        _READ,
        "lora_target_linear beside lora_target_modules: which layers all-linear means",
    ),
    "LoraLayer": PrivateName("peft.tuners.lora.layer:LoraLayer", _READ, "optimize: counts the layers"),
    "BaseTunerLayer": PrivateName("peft.tuners.tuners_utils:BaseTunerLayer", _READ, _DISPATCH),
    "dispatch_default": PrivateName("peft.tuners.lora.model:dispatch_default", _READ, _DISPATCH),
    "DoraLinearVariant": PrivateName("peft.tuners.lora.variants:DoraLinearVariant", _READ, _OURS),
    "check_adapters_to_merge": PrivateName("peft.tuners.tuners_utils:check_adapters_to_merge", _READ, _OURS),
    "hotswap_from_state_dict": PrivateName(
        "peft.utils.hotswap:hotswap_adapter_from_state_dict", _READ, "refused for a base that was changed"
    ),
    "update_layer": PrivateName(f"{_LAYER}.update_layer", _READ, "LoraLinear: overridden"),
    "caches": PrivateName(f"{_LAYER}()._caches", _READ, "LoraLinear: the packed base while merged"),
    "lora_variant": PrivateName(f"{_LAYER}().lora_variant", _READ, _OURS),
    "lora_bias": PrivateName(f"{_LAYER}().lora_bias", _READ, _OURS),
    "lora_magnitude_vector": PrivateName(f"{_LAYER}().lora_magnitude_vector", _READ, _OURS),
    "merged_adapters": PrivateName(f"{_LAYER}().merged_adapters", _READ, _OURS),
    "modules_to_save": PrivateName(
        "peft.utils.other:ModulesToSaveWrapper().modules_to_save", _READ, "the head: its trained copy"
    ),
    "original_module": PrivateName(
        "peft.utils.other:ModulesToSaveWrapper().original_module", _READ, "the head: its frozen copy"
    ),
}

__getattr__ = loads_on_use(__name__, NAMES)


def replace_dispatch(dispatch: Any) -> None:
    """PEFT's last resort for the class of a LoRA layer, which takes a QuantLinear for an nn.Linear."""
    import peft.tuners.lora.model as lora_model

    lora_model.dispatch_default = dispatch  # type: ignore[attr-defined]


def replace_hotswap(hotswap: Any) -> None:
    """What `hotswap_adapter` calls once it has read the file."""
    import peft.utils.hotswap as module

    module.hotswap_adapter_from_state_dict = hotswap


def check_forward_args(layer: Any, *arguments: Any, **keywords: Any) -> None:
    """PEFT's own refusals of what a wrapper is called with."""
    layer._check_forward_args(*arguments, **keywords)


def caches(layer: Any) -> dict[str, Any]:
    """A dictionary that PEFT keeps beside a layer and never saves."""
    return layer._caches
