"""transformers' road to packed weights: MonographConfig, and the quantizer behind `from_pretrained`.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=mg.MonographConfig("nf4"))

The model keeps its dense layers on the meta device until a weight arrives; the weight is then quantised (or,
in a folder that is quantised already, taken as it is) and its layer replaced. No placeholder of another dtype
is ever registered: transformers casts a checkpoint to the placeholder's dtype before it quantises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from monograph.formats import format_named
from monograph.nn.quant_linear import QuantLinear, dense_linear
from monograph.packed_weight import PackedWeight, quantize
from monograph.spellings.bitsandbytes import from_bitsandbytes, to_bitsandbytes

METHOD = "monograph"


@register_quantization_config(METHOD)
class MonographConfig(QuantizationConfigMixin):
    """How `from_pretrained` quantises: format, block size, double quantisation, and which modules stay dense.

    `skip_modules` are module names as transformers matches them; None takes transformers' own choice, the
    output head and what is tied to it. A saved model carries bitsandbytes' config and keys, so that
    transformers with bitsandbytes loads it too.
    """

    def __init__(
        self,
        format: str = "nf4",
        *,
        block_size: int = 64,
        double_quant: bool = False,
        skip_modules: list[str] | None = None,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise ValueError(f"MonographConfig: unknown arguments {sorted(unknown)}")
        format_named(format).check_block(block_size)
        self.quant_method = METHOD  # type: ignore[assignment]
        self.format = format
        self.block_size = block_size
        self.double_quant = double_quant
        self.skip_modules = skip_modules

    @classmethod
    def from_bitsandbytes(cls, config: dict[str, Any]) -> MonographConfig:
        """From the quantization_config of a folder that bitsandbytes wrote."""
        if not config.get("load_in_4bit"):
            raise ValueError("quantization_config: load_in_4bit is not set, wanted a 4-bit checkpoint")
        return cls(
            config.get("bnb_4bit_quant_type", "fp4"),
            double_quant=config.get("bnb_4bit_use_double_quant", False),
            skip_modules=config.get("llm_int8_skip_modules"),
        )

    def loading_dict(self) -> dict[str, Any]:
        """What `config.quantization_config` must hold for transformers to choose this quantizer."""
        return dict(self.__dict__)

    def to_dict(self) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_quant_type": self.format,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": self.skip_modules,
            "llm_int8_threshold": 6.0,
        }


class _Replace(ConversionOps):
    """Turns the tensors of one weight into a QuantLinear and puts it in place of the dense layer."""

    def __init__(self, hf_quantizer: MonographQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def packed(self, tensors: dict[str, torch.Tensor]) -> PackedWeight | None:
        """None leaves the layer dense."""
        raise NotImplementedError

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        full_layer_name: str | None = None,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        assert model is not None
        assert full_layer_name is not None
        tensors = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        packed = self.packed(tensors)
        if packed is None:
            return {full_layer_name: next(iter(tensors.values()))}
        path = full_layer_name.rpartition(".")[0]
        parent, child = path.rpartition(".")[::2]
        dense: Any = model.get_submodule(path)
        wanted = (dense.out_features, dense.in_features)
        if packed.shape != wanted:
            raise ValueError(f"{full_layer_name}: the checkpoint has shape {packed.shape}, wanted {wanted}")
        layer = QuantLinear(packed, dense.bias)
        layer.train(dense.training)
        layer._is_hf_initialized = True  # type: ignore[assignment]
        for parameter in layer.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        setattr(model.get_submodule(parent), child, layer)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


class Quantize(_Replace):
    """A dense weight of the checkpoint, quantised as it is read."""

    def packed(self, tensors: dict[str, torch.Tensor]) -> PackedWeight:
        (weight,) = tensors.values()
        config = self.hf_quantizer.quantization_config
        return quantize(weight, config.format, block_size=config.block_size, double_quant=config.double_quant)


class Deserialize(_Replace):
    """The tensors bitsandbytes wrote for one weight; a weight without a quant_state stays dense."""

    def packed(self, tensors: dict[str, torch.Tensor]) -> PackedWeight | None:
        if len(tensors) == 1:
            return None
        return from_bitsandbytes(tensors, "weight")


@register_quantizer(METHOD)
class MonographQuantizer(HfQuantizer):
    """Behind `from_pretrained` for `MonographConfig`, and behind `monograph.from_pretrained`."""

    quantization_config: MonographConfig
    serialized_names: dict[str, list[str]] = {  # noqa: RUF012  (an attribute of the base class)
        "weight": [
            "weight",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_map",
            "weight.absmax",
            "weight.quant_state.bitsandbytes__nf4",
            "weight.quant_state.bitsandbytes__fp4",
        ]
    }

    @property
    def quantized_element_size(self) -> float:
        return 0.5

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        path, name = param_name.rpartition(".")[::2]
        layer = model.get_submodule(path)
        return (
            name == "weight"
            and isinstance(layer, nn.Linear)
            and should_convert_module(path, self.modules_to_not_convert)
        )

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.skip_modules, model._keep_in_fp32_modules
        )

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
        if not layers:
            raise ValueError(f"{type(model).__name__}: no layer was quantised, wanted at least one")
        for layer in layers:
            layer.requires_grad_(False)
        # Saving reverts the conversions of loading; ours is undone by get_state_dict_and_metadata instead.
        model._weight_conversions = [
            conversion
            for conversion in model._weight_conversions
            if not any(isinstance(op, _Replace) for op in getattr(conversion, "operations", ()))
        ]
        return model

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"deserialize": Deserialize}

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """bitsandbytes' keys. A model whose layers were all merged is saved as an ordinary dense one."""
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
        if not layers:
            self.remove_quantization_config(model)
            return None, {}
        state = model.state_dict()
        for name, layer in layers.items():
            for part in ("values", "absmax", "groups", "map", "offset"):
                state.pop(f"{name}.{part}", None)
            state.update(to_bitsandbytes(layer.packed, f"{name}.weight"))
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantLinear):
                dense = dense_linear(nn.Parameter(layer.dequantize(dtype)), layer.bias)
                model.set_submodule(name, dense)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
