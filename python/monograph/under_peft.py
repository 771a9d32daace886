"""optimize: puts Monograph beneath a PEFT model, so that its training step is one graph."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn
from transformers import PreTrainedModel

from monograph import transformers_attention
from monograph.nn.lora_linear import LoraLinear
from monograph.nn.quant_linear import QuantLinear


def optimize(model: nn.Module, *, attention: bool = True) -> nn.Module:
    """Changes a PEFT model in place and returns it. Call it once, after the adapters are there.

    - PEFT's LoRA layers over a QuantLinear become `LoraLinear`: same names, same files, fused arithmetic.
    - With `attention`, a transformers model uses our packed attention.
    - The input hook of `gradient_checkpointing_enable` is removed where checkpointing does not need it: it
      breaks the graph, and only reentrant checkpointing wants inputs that require gradients.

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        mg.optimize(model)

    A later `load_adapter` or `add_adapter` needs no second call: new adapters enter the same layers.
    """
    for layer in list(model.modules()):
        if type(layer) is PeftLinear and isinstance(layer.get_base_layer(), QuantLinear):
            LoraLinear.take_over(layer)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(base, PreTrainedModel):
        if attention:
            base.set_attn_implementation(transformers_attention.NAME)
        _drop_input_hook(base)
    return model


def add_lora(model: nn.Module, config: LoraConfig, **options: Any) -> PeftModel:
    """`get_peft_model` and `optimize` in one call; `options` go to `get_peft_model`."""
    wrapped = get_peft_model(model, config, **options)
    optimize(wrapped)
    return wrapped


def _drop_input_hook(model: PreTrainedModel) -> None:
    """transformers and PEFT each install one; `disable_input_require_grads` alone would leave one behind."""
    if not model.is_gradient_checkpointing:
        return
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None and getattr(function, "keywords", {}).get("use_reentrant", True):
            return
    model.disable_input_require_grads()
    hooks = model.get_input_embeddings()._forward_hooks
    for number, hook in list(hooks.items()):
        if getattr(hook, "__name__", "").startswith("make_inputs_require_grad"):
            del hooks[number]
