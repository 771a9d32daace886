"""TRL's fused head on our operator.

A trainer of TRL (1.16) gives the model a forward that, called with `fused_lm_head=True`, returns
log-probabilities and what TRL logs of each token instead of logits. On a CPU it scores every token, those
without a label too, in tiles that break the graph, with a gradient in float32. `take_over` replaces that path
alone, on this one model; settings are read from TRL's own forward, and whatever does not look as expected is
left as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from monograph.distributed.sharded_layer import ShardedLayer, whole_and_again
from monograph.nn.quant_linear import QuantLinear
from monograph.ops.linear_cross_entropy import IGNORED
from monograph.ops.linear_log_probs import linear_log_probs
from monograph.ops.providers import may_take_over
from monograph.training.loss import head_operands, next_labels, readable_head
from monograph.upstream.trl_names import fused_head_variables


class _Settings(NamedTuple):
    """What `add_fused_lm_head` was called with, and what it has read from the config."""

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    final_logit_softcapping: float | None
    logit_scale: float
    backbone_attr: str
    FusedCausalLMOutput: Callable[..., Any]  # the class of what it returns


def _settings(forward: Any) -> _Settings | None:
    found = fused_head_variables(forward)
    if found is None or not set(_Settings._fields) <= set(found):
        return None
    return _Settings(**{name: found[name] for name in _Settings._fields})


def _computable(settings: _Settings, model: Any) -> bool:
    capped = settings.final_logit_softcapping is not None
    routed = getattr(model.config.get_text_config(), "output_router_logits", False)
    # TRL divides by the temperature behind the cap.
    return not (settings.cast_lm_head_to_fp32 or routed or (capped and settings.temperature != 1.0))


def _ours(head: Any) -> bool:
    """Whether the device of the head has a kernel of ours; else TRL's own code stays, which for CUDA and XPU
    is in Triton. A packed head is read by ours alone, in its portable form where there is no kernel."""
    return isinstance(head, QuantLinear) or may_take_over(head.weight.device.type, "linear_log_probs")


def _positions(model: Any, options: dict[str, Any]) -> torch.Tensor | None:
    """Positions of a padded batch as `generate` counts them, from a row's first token on; None where the
    model counts for itself. TRL pads prompts on the left and says nothing of positions, and rotary embeddings
    of shifted positions have other last bits."""
    mask = options.get("attention_mask")
    told = options.get("position_ids") is not None
    if told or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return None
    if any(hasattr(part, "get_rope_index") for part in (model, model.base_model)):  # one position per axis
        return None
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def _no_tokens(table: Any) -> str:
    """TRL reads weight and bias of a head, and PEFT's trained tokens on one have none of their own."""
    return (
        f"the head is {type(table).__name__} of PEFT (trainable_token_indices of a model whose head is its "
        "embedding), which TRL's head cannot read; leave trainable_token_indices out, write modules_to_save="
        "['embed_tokens'] with ensure_weight_tying=True, or train by monograph.training.TrainStep"
    )


def take_over(model: nn.Module) -> bool:
    """Whether the model had TRL's head and now computes it with `linear_log_probs`."""
    trl_forward: Any = model.__dict__.get("forward")
    settings = _settings(trl_forward)
    if settings is None or not _computable(settings, model):
        return False

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *arguments: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **options: Any,
    ) -> Any:
        table = self.get_output_embeddings()
        head = readable_head(table)
        wanted = labels if shift_labels is None else shift_labels
        routed = options.get("output_router_logits", False)  # asks for the router's loss, too
        for_trl = not fused_lm_head or routed
        if fused_lm_head and not hasattr(table, "bias"):
            raise ValueError(_no_tokens(table))
        if for_trl or wanted is None or head is None or not _ours(head):
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            given = {name: value for name, value in given.items() if value is not None}
            return trl_forward(*arguments, fused_lm_head=fused_lm_head, **given, **options)
        options["use_cache"] = False
        if (positions := _positions(self, options)) is not None:
            options["position_ids"] = positions
        hidden = getattr(self, settings.backbone_attr)(*arguments, **options).last_hidden_state
        # The last token has no next one: it is ignored here, and cut off below.
        targets = wanted if shift_labels is not None else next_labels(wanted)
        with whole_and_again(head) if isinstance(head, ShardedLayer) else nullcontext():
            found = linear_log_probs(
                *head_operands(hidden, head),
                targets,
                None if head.bias is None else head.bias.to(hidden.dtype),
                softcap=settings.final_logit_softcapping or 0.0,
                scale=settings.logit_scale / settings.temperature,
            )
        tokens = targets.shape[1] - int(shift_labels is None)
        mask = (targets != IGNORED)[:, :tokens]
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        asked = {
            name: value[:, :tokens] if name == "log_probs" or name in settings.outputs else None
            for name, value in found._asdict().items()
        }
        return settings.FusedCausalLMOutput(loss=-found.log_probs.sum() / count, label_mask=mask, **asked)

    model.forward = MethodType(forward, model)
    return True
