"""optimize: puts Monograph beneath a PEFT model, so that its training step is one graph."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from monograph.hf.accelerate.sharding import unheeded_sharding
from monograph.hf.generation import take_generation
from monograph.hf.peft.lora_experts import (
    all_linear_without_router,
    expert_parameters,
    take_over_experts,
)
from monograph.hf.peft.lora_linear import LoraLinear, fusible
from monograph.hf.transformers.activation_checkpointing import is_checkpointing
from monograph.hf.transformers.attention import put_on
from monograph.hf.transformers.elementwise import take_over as take_over_elementwise
from monograph.hf.transformers.fused_head import take_head
from monograph.hf.transformers.recurrent_layers import take_over as take_over_recurrent
from monograph.hf.trl import head as trl_head
from monograph.nn.dense_source import local_folder, remember_dense
from monograph.nn.linear4bit import replace_linear4bit
from monograph.nn.quant_linear import QuantLinear
from monograph.packing.stateful_layers import guard_packed
from monograph.training.regions import make_regions
from monograph.upstream.peft_names import BaseTunerLayer, LoraLayer, PeftLinear
from monograph.upstream.torch_names import forward_hooks, hooks
from monograph.upstream.transformers_names import INPUT_HOOK, checkpoint_function
from monograph.upstream.untested import mode_on_this_torch

_log = logging.getLogger("monograph")


def optimize(
    model: nn.Module,
    *,
    attention: bool | None = None,
    head: bool = True,
    elementwise: bool | None = None,
    regions: bool = False,
) -> nn.Module:
    """Changes a PEFT model in place and returns it. Call it once, after the adapters are there.

    - PEFT's LoRA layers over a QuantLinear, or over a frozen nn.Linear in bf16 on a CPU, become `LoraLinear`:
      same names, same files, fused arithmetic. DoRA over a dense layer stays PEFT's.
    - 4-bit layers of bitsandbytes become QuantLinear on their own bytes, with or without LoRA over them.
    - PEFT's LoRA on experts (`target_parameters`) runs in `monograph::experts`, packed or dense.
    - A transformers model uses our packed attention, unless its user chose another than `sdpa` or its device
      has no kernel of ours. `attention=True` wants it in any case, `attention=False` keeps what is there.
    - Recurrent layers of Qwen3-Next, Qwen3.5, OLMo-hybrid and LFM2 run on our operators and take packed rows
      (docs/explain/recurrent.md). A model refuses them if it has other layers that carry state along a row,
      or an attention that reads no boundaries of documents.
    - With `head`, the head that a trainer of TRL has put on the model computes with `linear_log_probs`: the
      same numbers without a graph break, and nothing for tokens that have no label. Without gradients the
      logits come from the same product, so that tokens are drawn from the numbers they are scored with.
    - `generate` sends equal prompts through the model once (docs/reference/training.md).
    - Norms, gated MLPs, rotary positions, frozen routers and the first residual sum of a layer, of kinds that
      are known, compute with `rms_norm`, `silu_mul`, `gelu_mul`, `rotary` and `choose_experts`: faster, the
      same bits in eager mode and in a graph, and other last bits than transformers' code
      (docs/reference/training.md). `elementwise=False` leaves them, `elementwise=True` warns if there are
      none.
    - The input hook of checkpointing breaks the graph. It is removed where checkpointing does not need it and
      else kept out of graphs: only reentrant checkpointing wants inputs that require gradients.
    - With `regions`, each decoder layer is one operator, traced once per kind of layer
      (docs/reference/training.md). A trainer then wants `torch_compile_backend="aot_eager"`: the first step
      takes seconds and no compiler.

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        mg.optimize(model)

    Where accelerate was asked for FSDP and runs DDP (on a CPU), it warns.

    A later `load_adapter` or `add_adapter` needs no second call: new adapters enter the same layers.
    """
    _pack_linear4bit(model)
    stacks = take_over_experts(model)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    shared = _shared_parameters(model)
    taken = [layer for layer in layers if _is_ours(layer, shared)]
    for layer in taken:
        LoraLinear.take_over(layer)
    _tell(layers, len(stacks) + sum(not layer.has_modules_to_call(_active(layer)) for layer in taken))
    if (unheeded := unheeded_sharding()) is not None:
        _log.warning("monograph: %s", unheeded)
    if (start := adapter_start(model)) is not None:
        _log.info("monograph: %s", start)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if elementwise is not False:
        _fuse_elementwise(base, asked=elementwise is True)
    if isinstance(base, PreTrainedModel):
        put_on(base, attention)
        take_over_recurrent(base)
        guard_packed(base)
        if head:
            trl_head.take_over(base)
            take_head(base)
        take_generation(base)
        _drop_input_hook(base)
        # A trainer turns checkpointing on, and with it the hook, only in `train()`.
        base.enable_input_require_grads = MethodType(enable_input_require_grads, base)  # type: ignore[method-assign]
    if regions and mode_on_this_torch("graph") == "graph":
        make_regions(model)
    return model


def _is_ours(layer: nn.Module, shared: set[int]) -> bool:
    if isinstance(layer, LoraLinear):
        return True
    if _is_over_linear4bit(layer):
        return isinstance(layer.base_layer, QuantLinear)
    if type(layer) is not PeftLinear:
        return False
    base: Any = layer.base_layer
    if isinstance(base, QuantLinear):
        return True
    watched = any(hooks(base)) or id(base.weight) in shared
    return fusible(base) and not watched and not layer.lora_variant


def _is_over_linear4bit(layer: nn.Module) -> bool:
    """Whether it is PEFT's LoRA layer over a 4-bit layer of bitsandbytes, which PEFT has only beside it."""
    if "bitsandbytes" not in sys.modules:
        return False
    from monograph.upstream.peft_names import PeftLinear4bit

    return type(layer) is PeftLinear4bit


def _pack_linear4bit(model: nn.Module) -> None:
    """The 4-bit layers of bitsandbytes become QuantLinear on the same bytes. Left are those that somebody
    hooked, that have an adapter merged into them, or one of another kind than LoRA."""

    def may_replace(parent: Any, layer: nn.Module) -> bool:
        adapted = isinstance(parent, BaseTunerLayer)
        ours = not adapted or (_is_over_linear4bit(parent) and not parent.merged)
        return ours and not any(hooks(layer)) and "forward" not in vars(layer)

    count = replace_linear4bit(model, may_replace)
    if count:
        _log.info("monograph.optimize: %d 4-bit layers of bitsandbytes compute with monograph::linear", count)


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters under more than one name: others may change them or expect them to be called."""
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, count in names.items() if count > 1}


def _tell(layers: list[Any], taken: int) -> None:
    """Says how many layers were fused; a call without any effect on them is a warning."""
    if taken:
        _log.info("monograph.optimize: %d of %d LoRA layers are fused", taken, len(layers))
    elif not layers:
        warnings.warn(
            "monograph.optimize fused no layer: the model has no LoRA layers. Call it after get_peft_model, "
            "or use monograph.add_lora(model, config)",
            stacklevel=3,
        )
    else:
        bases = sorted({type(layer.get_base_layer()).__name__ for layer in layers})
        warnings.warn(
            f"monograph.optimize fused none of {len(layers)} LoRA layers: they lie on {', '.join(bases)}, "
            "wanted QuantLinear, or nn.Linear frozen in bf16. Load the model with monograph.from_pretrained",
            stacklevel=3,
        )


def _fuse_elementwise(model: nn.Module, asked: bool) -> None:
    taken = take_over_elementwise(model)
    if any(taken):
        _log.info("monograph.optimize: fused are %s", taken)
    elif asked:
        warnings.warn(
            "monograph.optimize(elementwise=True) fused nothing: no module of a known kind on a CPU",
            stacklevel=3,
        )


def add_lora(
    model: nn.Module,
    config: LoraConfig,
    *,
    dense: str | os.PathLike[str] | nn.Module | None = None,
    elementwise: bool | None = None,
    head: bool = True,
    experts: bool = False,
    **options: Any,
) -> PeftModel:
    """`get_peft_model` and `optimize` in one call; `elementwise` and `head` go to the second, the rest to the
    first.

    `experts=True` adds the weights of all experts to the config's `target_parameters`. PEFT's "all-linear"
    has them already where they were linear layers once (Qwen, Mixtral, DeepSeek ...), and with them the
    router, which is left out here: docs/explain/experts.md.

    `dense` is for PiSSA and LoftQ on a folder that was quantised before: the folder of its 16-bit weights, or
    the dense model. A model that was quantised while it was loaded knows its folder.
    """
    if dense is not None:
        if not isinstance(dense, nn.Module):
            dense = local_folder(os.fspath(dense))  # before the model is touched
        remember_dense(model, dense)
    config = all_linear_without_router(model, config)
    if experts:
        config = _with_experts(model, config)
    wrapped = get_peft_model(model, config, **options)
    if isinstance(dense, nn.Module):
        remember_dense(wrapped, None)
    optimize(wrapped, elementwise=elementwise, head=head)
    return wrapped


def _with_experts(model: nn.Module, config: LoraConfig) -> LoraConfig:
    found = expert_parameters(model)
    if not found:
        raise ValueError(f"experts is True, {type(model).__name__} has none of a kind that is known")
    asked = list(config.target_parameters or ())
    return replace(config, target_parameters=list(dict.fromkeys([*asked, *found])))


@dataclass(frozen=True)
class AdapterStart:
    """How far a model with PiSSA or LoftQ began from the weights it stands for, over all its layers.

    `before` and `after` are ||W - start|| / ||W||, with a zero start and with this one. W are the dense
    weights if `against_dense`, else those that the packed base stands for, and then `before` is 0.
    """

    method: str
    layers: int
    against_dense: bool
    before: float
    after: float

    def __str__(self) -> str:
        against = "the dense weights" if self.against_dense else "the packed base"
        return (
            f"{self.method} on {self.layers} layers: the start is {100 * self.after:.2f} % from {against}, "
            f"a zero start {100 * self.before:.2f} %"
        )


def adapter_start(model: nn.Module, adapter: str = "default") -> AdapterStart | None:
    """None for an adapter that starts at zero, or that was loaded."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    starts = [layer.starts[adapter] for layer in layers if adapter in getattr(layer, "starts", {})]
    if not starts:
        return None
    weight = sum(start.weight for start in starts)
    before, after = (sum(getattr(s, name) for s in starts) for name in ("before", "after"))
    dense = all(start.against_dense for start in starts)
    return AdapterStart(
        starts[0].method, len(starts), dense, (before / weight) ** 0.5, (after / weight) ** 0.5
    )


def enable_input_require_grads(model: PreTrainedModel) -> None:
    """In place of the model's own method, which enabling of checkpointing calls."""
    type(model).enable_input_require_grads(model)
    _drop_input_hook(model)


def _drop_input_hook(model: PreTrainedModel) -> None:
    """transformers, PEFT and TRL install it; `disable_input_require_grads` alone would leave one behind.

    For reentrant checkpointing, and as long as its kind is not known, the hook stays, but outside graphs: a
    traced checkpoint of either kind needs no inputs that require gradients.
    """
    hooks = forward_hooks(model.get_input_embeddings())
    found = [n for n, hook in hooks.items() if getattr(hook, "__name__", "").startswith(INPUT_HOOK)]
    if is_checkpointing(model) and not _checkpoints_reentrantly(model):
        model.disable_input_require_grads()
        for number in found:
            hooks.pop(number, None)
    else:
        for number in found:
            hooks[number] = _outside_graphs(hooks[number])


def _checkpoints_reentrantly(model: PreTrainedModel) -> bool:
    functions = (checkpoint_function(module) for module in model.modules())
    return any(f is not None and getattr(f, "keywords", {}).get("use_reentrant", True) for f in functions)


def _outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def unless_traced(*arguments: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(*arguments)

    return unless_traced
