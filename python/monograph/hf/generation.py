"""`generate` of a model on our operators: equal prompts go through it once, adapters are read once.

GRPO draws several completions of each prompt and hands the prompt over as many times. Its keys and values are
computed once here and copied to the rows that want them. Rows of our operators have the same bits in any
batch, so the tokens drawn are those of a `generate` that computes each row for itself.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin

from monograph.hf.peft.lora_linear import kept_factors
from monograph.hf.transformers.shared_rows import SharedRows
from monograph.upstream.transformers_names import (
    PREFILL,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

# Inputs of a prefill that have a row for each prompt.
_BY_ROW = ("attention_mask", "position_ids")
# What more a model may be asked to return of each token.
_MORE = ("output_hidden_states", "output_attentions")


def take_generation(model: Any) -> None:
    """Gives the model its `generate`, unless it has one of somebody else or cannot generate."""
    if "generate" in model.__dict__ or PREFILL in model.__dict__ or not hasattr(type(model), PREFILL):
        return
    model.generate = MethodType(generate, model)
    setattr(model, PREFILL, MethodType(prefill, model))


@functools.wraps(GenerationMixin.generate)
def generate(self: Any, *arguments: Any, **options: Any) -> Any:
    with kept_factors():
        return type(self).generate(self, *arguments, **options)


def prefill(
    self: Any, input_ids: Any, generation_config: Any, model_kwargs: Any, *rest: Any, **more: Any
) -> Any:
    """In the place of transformers' own, which gets one row of each prompt."""
    own = getattr(type(self), PREFILL)
    shared = _shared(input_ids, generation_config, model_kwargs)
    if shared is None:
        return own(self, input_ids, generation_config, model_kwargs, *rest, **more)
    first, of_row = shared
    fewer = {name: _rows(value, first) if name in _BY_ROW else value for name, value in model_kwargs.items()}
    outputs = own(self, input_ids[first], generation_config, fewer, *rest, **more)
    model_kwargs["past_key_values"].batch_select_indices(of_row)
    SharedRows.tell(of_row)
    outputs.logits = outputs.logits[of_row]
    return outputs


prefill.__name__ = PREFILL  # a pickle asks the model for it by this name, and finds transformers' own


def _rows(value: Any, rows: torch.Tensor) -> Any:
    whole = not isinstance(value, torch.Tensor) or value.shape[0] == 1
    return value if whole else value[rows]


def _shared(
    input_ids: torch.Tensor, config: Any, inputs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The first row of each prompt, and for each row which of them it is; None if nothing is to be gained, or
    if the prompt is more than its tokens."""
    cache = inputs.get("past_key_values")
    plain = (
        input_ids.dim() == 2
        and input_ids.shape[0] > 1
        and type(cache) is DynamicCache
        and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
        and cache.get_seq_length() == 0
        and config.prefill_chunk_size is None
        and not any(getattr(config, name, False) for name in _MORE)
        and not any(_has_rows(name, value) for name, value in inputs.items())
    )
    if not plain:
        return None
    prompts = input_ids
    mask = inputs.get("attention_mask")
    if mask is not None:
        if mask.shape != input_ids.shape:
            return None
        prompts = torch.cat((input_ids, mask.to(input_ids.dtype)), dim=1)
    _, of_row = torch.unique(prompts, dim=0, return_inverse=True)
    count = int(of_row.max()) + 1
    if count == input_ids.shape[0]:
        return None
    # Prompts in the order of their first rows.
    rows = torch.arange(len(of_row), device=of_row.device)
    first = torch.full((count,), len(of_row), device=of_row.device).scatter_reduce(0, of_row, rows, "amin")
    first, order = first.sort()
    return first, order.argsort()[of_row]


def _has_rows(name: str, value: Any) -> bool:
    """Whether an input is a tensor of which it is not known that it follows from the prompt."""
    if name in _BY_ROW:
        return isinstance(value, torch.Tensor) and value.dim() != 2
    return isinstance(value, torch.Tensor) and value.numel() > 1
