"""Private names of transformers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from monograph.upstream.private_name import PrivateName, loads_on_use

if TYPE_CHECKING:  # a base class must be known to the type checker
    from transformers.core_model_loading import ConversionOps as ConversionOps
    from transformers.core_model_loading import WeightConverter as WeightConverter

_READ = "5.22.2"
_MODEL = "transformers:PreTrainedModel"
_QWEN3_NEXT = "transformers.models.qwen3_next.modeling_qwen3_next"
_QUANTIZER = "transformers.quantizers.base:HfQuantizer"

NAMES = {
    # loading
    "ConversionOps": PrivateName(
        "transformers.core_model_loading:ConversionOps", _READ, "loading: tensors of a file become a layer"
    ),
    "WeightConverter": PrivateName(
        "transformers.core_model_loading:WeightConverter", _READ, "loading: stacks of experts"
    ),
    "should_convert_module": PrivateName(
        "transformers.quantizers.quantizers_utils:should_convert_module", _READ, "loading: skip_modules"
    ),
    "before_loading": PrivateName(
        f"{_QUANTIZER}._process_model_before_weight_loading", _READ, "loading: overridden"
    ),
    "after_loading": PrivateName(
        f"{_QUANTIZER}._process_model_after_weight_loading", _READ, "loading: overridden"
    ),
    "dequantize_model": PrivateName(f"{_QUANTIZER}._dequantize", _READ, "model.dequantize(): overridden"),
    "get_modules_to_not_convert": PrivateName(
        f"{_QUANTIZER}.get_modules_to_not_convert", _READ, "loading: what stays dense"
    ),
    "weight_conversions": PrivateName(
        f"{_MODEL}()._weight_conversions", _READ, "saving: ours are not reverted by transformers"
    ),
    "original_patterns": PrivateName(
        "transformers.core_model_loading:WeightTransform._original_source_patterns",
        _READ,
        "loading: merges of single experts",
    ),
    "mark_initialized": PrivateName(
        f"{_MODEL}._initialize_missing_keys", _READ, "loading: reads _is_hf_initialized, which we set"
    ),
    "keep_in_fp32_modules": PrivateName(
        f"{_MODEL}._keep_in_fp32_modules", _READ, "loading: what a model wants in float32"
    ),
    # training
    "prefill": PrivateName(
        "transformers:GenerationMixin._prefill", _READ, "generate: equal prompts are computed once"
    ),
    "DynamicLayer": PrivateName(
        "transformers.cache_utils:DynamicLayer", _READ, "generate: a cache whose rows may be copied"
    ),
    "DynamicSlidingWindowLayer": PrivateName(
        "transformers.cache_utils:DynamicSlidingWindowLayer", _READ, "generate: the same with a window"
    ),
    "OptimizerNames": PrivateName(
        "transformers.training_args:OptimizerNames", _READ, "trainer: trl: which optimizers there are"
    ),
    "GradientCheckpointingLayer": PrivateName(
        "transformers.modeling_layers:GradientCheckpointingLayer", _READ, "per_layer: the repeated blocks"
    ),
    "checkpoint_function": PrivateName(
        f"{_MODEL}._set_gradient_checkpointing", _READ, "sets _gradient_checkpointing_func, which we read"
    ),
    "causal_mask_function": PrivateName(
        "transformers.masking_utils:causal_mask_function", _READ, "attention: whole rows are recognised"
    ),
    "attn_implementation": PrivateName(
        "transformers:PreTrainedConfig._attn_implementation", _READ, "optimize: a chosen attention is kept"
    ),
    "supports_attention_backend": PrivateName(
        f"{_MODEL}._supports_attention_backend", _READ, "packed rows: attention that reads no boundaries"
    ),
    "attention_functions": PrivateName(
        "transformers.models.llama.modeling_llama:ALL_ATTENTION_FUNCTIONS", _READ, "elementwise: by this name"
    ),
    "eager_attention": PrivateName(
        "transformers.models.llama.modeling_llama:eager_attention_forward", _READ, "elementwise: by this name"
    ),
    "apply_rotary": PrivateName(
        "transformers.models.llama.modeling_llama:apply_rotary_pos_emb", _READ, "elementwise: by this name"
    ),
    # recurrent layers
    **{
        layer: PrivateName(
            f"transformers.models.{model}.modeling_{model}:{layer}",
            _READ,
            "recurrent layers: its forward is ours",
        )
        for layer, model in (
            ("Qwen3NextGatedDeltaNet", "qwen3_next"),
            ("Qwen3_5GatedDeltaNet", "qwen3_5"),
            ("Qwen3_5MoeGatedDeltaNet", "qwen3_5_moe"),
            ("OlmoHybridGatedDeltaNet", "olmo_hybrid"),
            ("Lfm2ShortConv", "lfm2"),
            ("Lfm2MoeShortConv", "lfm2_moe"),
        )
    },
    "force_accelerate_hooks": PrivateName(
        "transformers.integrations.accelerate:force_accelerate_hooks", _READ, "recurrent layers: offloading"
    ),
    # experts
    "ALL_EXPERTS_FUNCTIONS": PrivateName(
        "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS", _READ, "experts_implementation='monograph'"
    ),
    "apply_gate": PrivateName(
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts._apply_gate",
        _READ,
        "experts: what a layer computes between its products",
    ),
    "load_balancing_loss": PrivateName(
        "transformers.models.qwen3_moe.modeling_qwen3_moe:load_balancing_loss_func",
        _READ,
        "the loss of a router: by this name",
    ),
    "router_recorder": PrivateName(
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoePreTrainedModel._can_record_outputs",
        _READ,
        "the loss of a router: which module gives its logits",
    ),
    # benchmarks
    "GptOssExperts": PrivateName(
        "transformers.models.gpt_oss.modeling_gpt_oss:GptOssExperts", _READ, "bench experts"
    ),
    "Qwen3MoeExperts": PrivateName(
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeExperts", _READ, "bench experts"
    ),
    "experts_implementation": PrivateName(
        "transformers:PreTrainedConfig._experts_implementation", _READ, "bench experts: grouped_mm"
    ),
    "torch_chunk_gated_delta_rule": PrivateName(
        f"{_QWEN3_NEXT}:torch_chunk_gated_delta_rule", _READ, "bench delta_rule"
    ),
    "torch_recurrent_gated_delta_rule": PrivateName(
        f"{_QWEN3_NEXT}:torch_recurrent_gated_delta_rule", _READ, "bench delta_rule"
    ),
    "causal_conv1d_fn": PrivateName(f"{_QWEN3_NEXT}:causal_conv1d_fn", _READ, "bench delta_rule"),
    "causal_conv1d_update": PrivateName(f"{_QWEN3_NEXT}:causal_conv1d_update", _READ, "bench delta_rule"),
    "Qwen3NextRMSNormGated": PrivateName(f"{_QWEN3_NEXT}:Qwen3NextRMSNormGated", _READ, "bench delta_rule"),
    "ForCausalLMLoss": PrivateName("transformers.loss.loss_utils:ForCausalLMLoss", _READ, "bench loss"),
    "Fp8Quantize": PrivateName(
        "transformers.integrations.finegrained_fp8:Fp8Quantize", _READ, "bench quantize"
    ),
    "fp8_quantize_one": PrivateName(
        "transformers.integrations.finegrained_fp8:Fp8Quantize._quantize_one", _READ, "bench quantize"
    ),
}

__getattr__ = loads_on_use(__name__, NAMES)

# How the names of the hooks begin that transformers and PEFT put on the embeddings for checkpointing.
INPUT_HOOK = "make_inputs_require_grad"

# How `generate` sends the prompts through the model.
PREFILL = "_prefill"

# What an attention's forward finds in the file of its model.
ATTENTION_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
ATTENTION_GLOBALS = (ATTENTION_FUNCTIONS, "eager_attention_forward", "apply_rotary_pos_emb")


def mark_initialized(layer: nn.Module) -> None:
    """Keeps transformers from drawing a layer and its parameters at random after loading."""
    for thing in (layer, *layer.parameters()):
        thing._is_hf_initialized = True  # type: ignore[attr-defined]


def weight_conversions(model: Any) -> list[Any]:
    return model._weight_conversions


def set_weight_conversions(model: Any, conversions: list[Any]) -> None:
    model._weight_conversions = conversions


def original_patterns(conversion: Any) -> tuple[list[str], list[str]]:
    """Sources and targets of a conversion as its author wrote them."""
    return conversion._original_source_patterns, conversion._original_target_patterns


def apply_gate(experts: Any, pre: Any) -> Any:
    """What a layer of experts makes of the output of gate and up."""
    return experts._apply_gate(pre)


def load_balancing_loss(causal: Any) -> Any:
    """The loss of its routers that a causal language model computes; None if it has none."""
    files = (sys.modules[kind.__module__] for kind in type(causal).__mro__)
    return next((f for f in (getattr(file, "load_balancing_loss_func", None) for file in files) if f), None)


def router_recorder(body: Any) -> Any:
    """Where transformers finds router logits: `target_class` and `index` of its output; None for nowhere."""
    return (getattr(body, "_can_record_outputs", None) or {}).get("router_logits")


def set_experts_implementation(config: Any, name: str) -> None:
    config._experts_implementation = name


def keep_in_fp32_modules(model: Any) -> Any:
    return model._keep_in_fp32_modules


def attn_implementation(model: Any) -> str | None:
    """The attention of a model: `sdpa` if its user said nothing."""
    return attn_implementation_of(model.config)


def attn_implementation_of(config: Any) -> str | None:
    return getattr(config, "_attn_implementation", None)


def supports_attention_backend(model: Any) -> bool:
    """Whether a class calls its attention through transformers' interface, keywords and all."""
    return bool(model._supports_attention_backend)


def checkpoint_function(module: nn.Module) -> Any:
    """What a checkpointed layer calls; None for other modules."""
    return getattr(module, "_gradient_checkpointing_func", None)
