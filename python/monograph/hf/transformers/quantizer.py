"""transformers' path to packed weights: the quantizer behind `from_pretrained`.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=mg.MonographConfig("nf4"))

The model keeps its dense layers on the meta device until a weight arrives; the weight is then quantised (or,
in a folder that is quantised already, taken as it is) and its layer replaced. No placeholder of another dtype
is ever registered: transformers casts a checkpoint to the placeholder's dtype before it quantises.
How a folder names its tensors and its config is the business of monograph.quant.quant_methods.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from monograph.hf.transformers.config import METHOD, MonographConfig
from monograph.hf.transformers.counted_elements import count_elements
from monograph.hf.transformers.dense_weights import expert_weights, what_stayed_dense
from monograph.hf.transformers.expert_loading import (
    STACKS,
    as_weight,
    conversions_of_stacks,
    is_merge_of_experts,
    put_experts,
    renamed_parts,
    stack_pattern,
    stack_tensors,
    stacked,
)
from monograph.hf.transformers.experts import experts_kind, is_experts
from monograph.hf.transformers.recurrent_layers import take_over as take_over_recurrent
from monograph.nn.dense_source import remember_dense
from monograph.nn.packed_embedding import PackedEmbedding
from monograph.nn.packed_experts import PackedExperts
from monograph.nn.quant_linear import QuantLinear, dense_linear
from monograph.ops.formats import GGML_FORMATS
from monograph.packing.stateful_layers import guard_packed
from monograph.quant.packed_weight import PackedWeight, quantize
from monograph.quant.stack_pair import Stack
from monograph.upstream.transformers_names import (
    ConversionOps,
    WeightConverter,
    keep_in_fp32_modules,
    mark_initialized,
    original_patterns,
    set_weight_conversions,
    should_convert_module,
    weight_conversions,
)

__all__ = ["MonographConfig", "MonographQuantizer"]

logger = logging.getLogger("monograph.transformers_quantizer")  # documented: users filter by it


class _Replace(ConversionOps):
    """Turns the tensors of one weight into a QuantLinear and puts it in place of the dense layer."""

    dense_dtype: torch.dtype | None = None  # what a weight that stays dense is cast to
    transposed = False  # experts of [E, in, out], whose packed bytes are [E, out, in]

    def __init__(self, hf_quantizer: MonographQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def packed(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Stack | None:
        """The weight, which dequantises to `dtype`; None leaves the layer dense."""
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
        path, name = full_layer_name.rpartition(".")[::2]
        dense: Any = model.get_submodule(path)
        kind = dense.experts_kind if isinstance(dense, PackedExperts) else None
        self.transposed = kind.transposed if kind else getattr(dense, "is_transposed", False)
        dtype = getattr(dense, name).dtype
        packed = self.packed(tensors, dtype)
        if packed is None:
            return {full_layer_name: next(iter(tensors.values())).to(dtype=self.dense_dtype)}
        if isinstance(dense, PackedExperts) or is_experts(dense):
            put_experts(dense, name, packed)
            if missing_keys is not None:
                missing_keys.discard(full_layer_name)
            return {}
        wanted = tuple(getattr(dense, name).shape)
        if not isinstance(packed, PackedWeight) or packed.shape != wanted:
            raise ValueError(f"{full_layer_name}: the checkpoint has shape {packed.shape}, wanted {wanted}")
        # A producer may have stored another dtype; the model's is what was asked for.
        layer = _packed_layer(full_layer_name, dense, replace(packed, dtype=dtype))
        layer.train(dense.training)
        parent, child = path.rpartition(".")[::2]
        mark_initialized(layer)
        setattr(model.get_submodule(parent), child, layer)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


def _packed_layer(name: str, dense: nn.Module, packed: PackedWeight) -> nn.Module:
    """What takes the place of a dense layer."""
    if isinstance(dense, nn.Linear):
        return QuantLinear(packed, dense.bias)
    scale = getattr(dense, "scalar_embed_scale", None)  # of the Gemmas
    if isinstance(dense, nn.Embedding) and (type(dense) is nn.Embedding or scale is not None):
        made = PackedEmbedding(packed, dense.padding_idx, scale)
        made.dense_type = type(dense)
        return made
    raise ValueError(f"{name}: packed in a {type(dense).__name__}, wanted nn.Linear")


class Quantize(_Replace):
    """A dense weight of the checkpoint, quantised as it is read."""

    def packed(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> PackedWeight:
        (weight,) = tensors.values()
        if self.transposed:
            weight = weight.transpose(1, 2).contiguous()
        config = self.hf_quantizer.quantization_config
        return quantize(
            weight,
            config.format,
            block_size=config.block_size,
            double_quant=config.double_quant,
            rule=config.rule,
            scale_type=config.scale_type,
        )


class Deserialize(_Replace):
    """The tensors that a producer wrote for one weight; a weight without scales stays dense."""

    def packed(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Stack | None:
        config = self.hf_quantizer.quantization_config
        parts = as_weight(tensors)
        if config.stored is not None:
            config.method.check_parts(config.stored, parts)
        return config.method.pack(parts, dtype)


class StackExperts(Deserialize):
    """The tensors of single experts of a layer as one stack, in place of transformers' own merge."""

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
        path, name = full_layer_name.rpartition(".")[::2]
        layer = model.get_submodule(path)
        config = self.hf_quantizer.quantization_config
        made = stacked(config.method, config.stored or {}, input_dict, getattr(layer, name).dtype)
        if isinstance(made, torch.Tensor):
            return {full_layer_name: made.to(dtype=self.dense_dtype)}
        put_experts(layer, name, made)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


def dense_linears(model: nn.Module) -> list[str]:
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not isinstance(layer, QuantLinear)
    ]


@register_quantizer(METHOD)
class MonographQuantizer(HfQuantizer):
    """Behind `from_pretrained` for `MonographConfig`, and behind `monograph.from_pretrained`."""

    quantization_config: MonographConfig

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        method = self.quantization_config.method
        return {"weight": list(method.parts)} if method.linears else {}

    def get_weight_conversions(self) -> list[Any]:
        """Linear layers by the names of their parts; stacks of experts by whole names, as `up_proj` and
        `down_proj` are linear layers elsewhere."""
        method = self.quantization_config.method
        stacks = []
        for name in STACKS if self.pre_quantized else ():
            sources = [stack_pattern(part) for part in method.stack_parts(name)]
            stacks.append(WeightConverter(sources, f"experts.{name}", [Deserialize(self)]))
        return [*stacks, *super().get_weight_conversions()]

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> list[Any]:
        """transformers' merges of single experts become ours, which read the scales too."""
        if self.quantization_config.stored is None:
            return super().update_weight_conversions(weight_conversions, model)
        method, updated = self.quantization_config.method, []
        for conversion in weight_conversions:
            if not is_merge_of_experts(conversion):
                updated += [*renamed_parts(method, conversion), conversion]
                continue
            sources, targets = original_patterns(conversion)
            parts = [source.removesuffix("weight") + part for source in sources for part in method.parts]
            updated.append(conversion.copy(parts, targets, operations=[StackExperts(self)]))
        return updated + self.get_weight_conversions()

    @property
    def quantized_element_size(self) -> float:
        return self.quantization_config.bits / 8

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The tensors of a weight are read as they lie. Those that no Deserialize receives must be numbers:
        transformers would cast codes without their scales."""
        for op in getattr(converter, "operations", ()):
            if isinstance(op, Deserialize):
                op.dense_dtype = dtype
                return None
        kind = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        if kind.startswith(("F8", "U8", "I8", "torch.float8", "torch.uint8", "torch.int8")):
            raise ValueError(
                f"{', '.join(converter.target_patterns)}: packed ({kind}) and neither a linear layer nor "
                "experts that are stored one by one or as a stack"
            )
        return super().get_new_dtype(converter, param, dtype)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        path, name = param_name.rpartition(".")[::2]
        layer = model.get_submodule(path)
        linear = name == "weight" and isinstance(layer, nn.Linear)
        stack = name in STACKS and (isinstance(layer, PackedExperts) or is_experts(layer))
        return (linear or stack) and should_convert_module(path, self.modules_to_not_convert)

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        self.choose_modules(model)

    def choose_modules(self, model: Any) -> None:
        """Which layers will be packed; experts of an unknown kind are refused."""
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.skip_modules, keep_in_fp32_modules(model)
        )
        if self.quantization_config.stored is None:
            self._refuse_experts(model)

    def _refuse_experts(self, model: Any) -> None:
        """Those of an unknown kind are no linear layers and would stay dense without a word, though most of a
        model."""
        for weight in expert_weights(model):
            if not should_convert_module(weight.path, self.modules_to_not_convert):
                continue
            if "bias" in weight.name and is_experts(weight.module):
                continue
            try:
                experts_kind(weight.module)
            except ValueError as error:
                raise ValueError(
                    f"{type(model).__name__}: {weight.full_name}, a weight of experts, cannot be packed: "
                    f"{error}; name the experts in skip_modules to leave them dense on purpose"
                ) from None

    def _why_dense(self, path: str) -> str:
        if self.quantization_config.stored is not None:
            return "dense in the folder"
        skipped = self.quantization_config.skip_modules
        if skipped is not None and not should_convert_module(path, skipped):
            return "skip_modules"
        if not should_convert_module(path, self.modules_to_not_convert):
            return "kept dense by transformers"
        return "without a weight in the folder"

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
        stacks = [layer for layer in model.modules() if isinstance(layer, PackedExperts)]
        if not layers and not stacks:
            raise ValueError(f"{type(model).__name__}: no layer was quantised, wanted at least one")
        for layer in (*layers, *stacks):
            layer.requires_grad_(False)
        dense = what_stayed_dense(model, self._why_dense)
        if dense is not None:
            logger.warning(dense)
        self.dense_at_load = dense_linears(model)
        if self.quantization_config.stored is None:
            self.quantization_config.dense_modules = self.dense_at_load
            remember_dense(model, model.name_or_path or None)
            for layer in layers:
                layer.rule = self.quantization_config.rule
        # Saving reverts the conversions of loading; ours is undone by get_state_dict_and_metadata instead.
        others = [
            conversion
            for conversion in weight_conversions(model)
            if not any(isinstance(op, _Replace) for op in getattr(conversion, "operations", ()))
        ]
        set_weight_conversions(model, others)
        take_over_recurrent(model)
        guard_packed(model)
        count_elements(model)
        return model

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"deserialize": Deserialize}

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """The keys of the config's method. A model whose layers were all merged is saved as a dense one."""
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
        stacks = {
            path: layer
            for path, layer in model.named_modules()
            if isinstance(layer, PackedExperts) and layer.stacks
        }
        for name, layer in model.named_modules():
            if isinstance(layer, PackedEmbedding):
                raise ValueError(f"{name} has format {layer.format.name}, which no quant method saves")
        if not layers and not stacks:
            self.remove_quantization_config(model)
            return None, {}
        if self.quantization_config.stored is not None:
            self.quantization_config.method.check_saved(self.quantization_config.stored)
        dense = dense_linears(model)
        if dense != self.dense_at_load:
            self.quantization_config.dense_modules = dense
        state = model.state_dict()
        for name, layer in layers.items():
            if layer.format.name in GGML_FORMATS:
                raise ValueError(f"{name} has format {layer.format.name}, which no quant method saves")
            parts = self.quantization_config.method.unpack(layer.packed)  # refuses what is sharded
            for part in layer.stored_names:
                del state[f"{name}.{part}"]
            state.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        method = self.quantization_config.method
        self.quantization_config.stacked_experts = bool(stacks)
        for path, experts in stacks.items():
            tensors = stack_tensors(method, path, experts)
            for weight in experts.stacks:
                for part in experts.stored_names(weight):
                    del state[f"{path}.{part}"]
            state.update(tensors)
        if stacks:  # they stay stacks in the folder
            set_weight_conversions(model, conversions_of_stacks(method, weight_conversions(model)))
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantLinear):
                dense = dense_linear(nn.Parameter(layer.dequantize(dtype)), layer.bias)
                model.set_submodule(name, dense)
            elif isinstance(layer, PackedEmbedding):
                model.set_submodule(name, layer.dense(dtype))
            elif isinstance(layer, PackedExperts):
                for weight in list(layer.stacks):
                    layer.put_dense(weight, layer.dequantize(weight, dtype))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def save_as_bitsandbytes(model: Any) -> None:
    """Puts our quantizer in the place of bitsandbytes' on a model whose layers are QuantLinear now: it knows
    their keys, and saves the folder that bitsandbytes would have saved."""
    old = model.hf_quantizer
    if isinstance(old, MonographQuantizer):
        return
    config = MonographConfig(stored=old.quantization_config.to_dict())
    quantizer = MonographQuantizer(config, pre_quantized=True)
    quantizer.modules_to_not_convert = getattr(old, "modules_to_not_convert", None) or []
    quantizer.dense_at_load = dense_linears(model)
    model.hf_quantizer = quantizer
    model.config.quantization_config = config
    model.quantization_method = METHOD
