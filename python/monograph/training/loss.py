"""The loss of a causal language model without its logits, for any transformers model.

    loss = forward_loss(model, batch, num_items)     # as model(**batch).loss, but no [tokens, V] tensor

The hidden states come from the model's own body and go to `linear_cross_entropy` with the head's weight,
plain or packed. What a model does to its logits behind the head (Gemma's soft-cap, the scaling of Granite and
Cohere) is read from its config; `verify_head` compares it with the model's own logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from monograph.distributed.sharded_layer import whole_if_sharded
from monograph.nn import QuantLinear
from monograph.ops.layout import plain_layout
from monograph.ops.linear_cross_entropy import IGNORED, linear_cross_entropy
from monograph.training.evaluating import evaluating
from monograph.training.router_logits import RouterLogits, router_loss, tap_routers
from monograph.upstream.instance_class import own_class
from monograph.upstream.torch_names import children, hooks

# What configs of transformers call a number that multiplies the logits.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
# Multiplies where all others (Granite, MiniCPM3) divide by `logits_scaling`.
_MULTIPLIES_BY_SCALING = ("hyperclovax",)

# In a batch, but not for the body of the model.
NOT_FOR_THE_BODY = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "use_cache")


def logits_map(config: Any) -> tuple[float, float]:
    """(softcap, scale): what a transformers model does to the logits of its head; (0, 1) for nothing."""
    config = config.get_text_config()
    softcap = next((s for s in (getattr(config, name, None) for name in _SOFTCAPS) if s), 0.0)
    for name in _MULTIPLIERS:
        scale = getattr(config, name, None)
        if scale is not None:
            return float(softcap), float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return float(softcap), 1.0
    multiplies = config.model_type in _MULTIPLIES_BY_SCALING
    return float(softcap), float(scaling if multiplies else 1 / scaling)


def _active(head: nn.Module) -> nn.Module:
    """The module PEFT's `modules_to_save` has put in the place of a head, if it has."""
    modules = children(head)
    if "modules_to_save" not in modules or "original_module" not in modules:
        return head
    wrapper: Any = head
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return wrapper.original_module
    return wrapper.modules_to_save[wrapper.active_adapters[0]]


def _changed_from_outside(head: nn.Module) -> bool:
    return bool("forward" in head.__dict__ or any(hooks(head)))


def readable_head(head: nn.Module) -> nn.Linear | None:
    """The `nn.Linear` or `QuantLinear` behind a head, also inside PEFT's `modules_to_save`.

    None for any other module, and for one with hooks: such a head must be called.
    """
    head = _active(head)
    known = isinstance(head, QuantLinear) or own_class(head) is nn.Linear
    return head if isinstance(head, nn.Linear) and known and not _changed_from_outside(head) else None


def head_operands(
    hidden: torch.Tensor, head: nn.Linear
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], list[int]]:
    """x, values, scales and layout of a readable head on `hidden`, as our operators take them."""
    if isinstance(head, QuantLinear):
        return head.permuted(hidden), *head.operands
    return hidden, head.weight.contiguous(), [], plain_layout(head.weight.shape)


def token_losses(
    hidden: torch.Tensor, head: nn.Module, labels: torch.Tensor, *, softcap: float = 0.0, scale: float = 1.0
) -> torch.Tensor:
    """The loss of each token, float32; `labels` are those of the next tokens, -100 for none.

    A head that is not readable (`readable_head`) is called, and its logits do exist.
    """
    linear = readable_head(head)
    if linear is not None:
        # The operator keeps dx and nothing of a frozen weight: a sharded head is gathered once.
        with whole_if_sharded(linear):
            bias = None if linear.bias is None else linear.bias.to(hidden.dtype)
            return linear_cross_entropy(
                *head_operands(hidden, linear), labels, bias, softcap=softcap, scale=scale
            )
    logits = _active(head)(hidden).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    flat = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return flat.reshape(labels.shape)


def count_targets(batch: Mapping[str, torch.Tensor]) -> int:
    """How many labels of a batch count in its loss: the first of each row is no token's next one."""
    if batch.get("shift_labels") is not None:
        return int((batch["shift_labels"] != IGNORED).sum())
    return int((batch["labels"][..., 1:] != IGNORED).sum())


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """For each token the label of the next one; none for the last."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def causal_lm_loss(
    hidden: torch.Tensor,
    head: nn.Module,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None = None,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
    shifted: bool = False,
) -> torch.Tensor:
    """The summed loss over `num_items`, or over the number of labels that count (at least 1).

    hidden [B, T, K], labels [B, T]: token t predicts label t + 1, unless `shifted` says that label t is
    already that of the next token. In packed rows the first label of each document must be -100, as the
    collators of `monograph.packing` give it; else a document would predict the next.
    """
    if not shifted:
        labels = next_labels(labels)
    losses = token_losses(hidden, head, labels, softcap=softcap, scale=scale)
    count = (labels != IGNORED).sum().clamp(min=1) if num_items is None else num_items
    # As a chain of float32 the sum of a long row would lose digits. Other devices may have no float64.
    wide = torch.float64 if losses.device.type in ("cpu", "cuda") else torch.float32
    return (losses.sum(dtype=wide) / count).float()


def causal_parts(model: nn.Module, asked_by: str = "forward_loss") -> tuple[nn.Module, nn.Module, nn.Module]:
    """The transformers model inside PEFT's wrapper, its body and its head."""
    causal: Any = model
    if hasattr(causal, "peft_config") and hasattr(causal, "get_base_model"):
        if any(config.is_prompt_learning for config in causal.peft_config.values()):
            kind = next(iter(causal.peft_config.values())).peft_type
            raise ValueError(
                f"{asked_by}: the adapter is {kind}, which changes the input; wanted LoRA or kin"
            )
        causal = causal.get_base_model()
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    body = getattr(causal, "base_model", causal)
    if head is None or body is causal:
        raise ValueError(f"{asked_by}: {type(causal).__name__} has no head over a body, wanted a causal LM")
    return causal, body, head


def forward_loss(
    model: nn.Module, batch: Mapping[str, Any], num_items: torch.Tensor | int | None = None
) -> torch.Tensor:
    """`model(**batch).loss` without the logits: the mean over labels, or the sum over `num_items`.

    With `config.output_router_logits` the loss of the routers is added as transformers does, after
    `add_router_loss(model)`. `batch` is what the collators give; its `num_items_in_batch` counts if
    `num_items` is None. Inside `torch.compile` pass a tensor: a Python number would compile anew for each
    value.
    """
    causal, body, head = causal_parts(model)
    config: Any = causal.config
    inputs = {key: value for key, value in batch.items() if key not in NOT_FOR_THE_BODY}
    routed = has_router_loss(config)
    if routed and "router_logits" not in vars(causal):
        raise ValueError(
            "forward_loss: config.output_router_logits is True, but the routers are not tapped; wanted "
            "monograph.training.add_router_loss(model) before, as TrainStep does"
        )
    if routed:
        inputs["output_router_logits"] = False  # by transformers' hooks
        vars(causal)["router_logits"].collected = []
    hidden = body(**inputs, use_cache=False).last_hidden_state
    softcap, scale = logits_map(config)
    shifted = batch.get("shift_labels") is not None
    labels = batch["shift_labels"] if shifted else batch["labels"]
    if num_items is None:
        num_items = batch.get("num_items_in_batch")
    loss = causal_lm_loss(hidden, head, labels, num_items, softcap=softcap, scale=scale, shifted=shifted)
    return loss + router_loss(causal, batch.get("attention_mask")) if routed else loss


def has_router_loss(config: Any) -> bool:
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def add_router_loss(model: nn.Module) -> RouterLogits | None:
    """Prepares a model whose config says `output_router_logits` for `forward_loss`, in place; None if not."""
    config = getattr(model, "config", None)  # PEFT's wrapper gives the model's
    if not hasattr(config, "get_text_config") or not has_router_loss(config):
        return None
    return tap_routers(causal_parts(model)[0])


@torch.no_grad()
def verify_head(model: nn.Module, tokens: int = 4) -> None:
    """Raises if the model does something to its logits that `forward_loss` does not know.

    Runs the model and its body once on `tokens` tokens, without dropout. Worth it before training a model
    whose kind was not tried yet.
    """
    causal, body, head = causal_parts(model)
    any_causal: Any = causal
    ids = torch.arange(tokens, device=next(causal.parameters()).device)[None]
    with evaluating(model):
        want = any_causal(input_ids=ids, use_cache=False).logits.float()
        softcap, scale = logits_map(any_causal.config)
        logits = head(body(input_ids=ids, use_cache=False).last_hidden_state).float() * scale
    got = softcap * torch.tanh(logits / softcap) if softcap else logits
    # The model scales and caps in its own dtype: up to four roundings of 2^-8 each in bf16.
    bound = 2.0**-6 * want.abs().max()
    if got.shape != want.shape or bool((got - want).abs().max() > bound):
        raise ValueError(
            f"forward_loss: the logits of {type(causal).__name__} are not those of its head with softcap "
            f"{softcap} and scale {scale}; train it through model(**batch).loss"
        )
