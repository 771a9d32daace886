"""Models whose attention reads no boundaries of documents: their packed rows are refused.

Falcon, Bloom, MPT and others of transformers have attention layers of their own, which ours cannot replace
and which `cu_seqlens` does not reach. Some of them (GPT-J, GPT-Neo) find the boundaries in position_ids and
some do not; their classes do not say which, so all are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from monograph.packing.packed_rows_hook import PackedRowsHook, require
from monograph.upstream.transformers_names import attn_implementation, supports_attention_backend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OURS = "monograph"


def _refusal(model: Any, what: str) -> str:
    attention = attn_implementation(model)
    return (
        f"packed rows ({what}) on {type(model).__name__}, whose attention is {attention!r} and does not read "
        f"the boundaries of documents. Wanted attention {OURS!r}, which not every class can take, or one "
        "document a row (sample_packing: false, PaddedCollator)"
    )


class _Guard(PackedRowsHook):
    """Looks at the attention when it is called: it may be set after the hook."""

    def refusal(self, module: nn.Module, what: str) -> str | None:
        return None if attn_implementation(module) == OURS else _refusal(module, what)


def _text_models(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models inside `model` that read text and are not known to read boundaries."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        return []
    config = models[0].config
    try:
        text = type(config.get_text_config())
    except ValueError:  # several of them: an encoder and a decoder of text
        text = type(config)
    text_models = [m for m in models if type(m.config) is text and not supports_attention_backend(m)]
    # Families whose recurrent layers are ours say at each call which documents their attention sees.
    return [m for m in text_models if "finds_documents" not in vars(m)]


def refuse_unsupported_attention(model: nn.Module, what: str) -> None:
    """Refuses a model that is about to be given packed rows; call it when its attention is set."""
    for module in _text_models(model):
        if attn_implementation(module) != OURS:
            raise ValueError(_refusal(module, what))


def guard_attention(model: nn.Module) -> None:
    for module in _text_models(model):
        if "needs_our_attention" not in vars(module):
            vars(module)["needs_our_attention"] = True
            module.register_forward_pre_hook(_Guard(), with_kwargs=True)


def check_attention_sees(module: nn.Module, name: str, kwargs: dict[str, Any]) -> None:
    """Refuses offsets that the model's attention would not follow.

    Ours and flash attention read them. The masks of sdpa and eager come from position_ids, if there is no
    mask and no cache: a document begins where a position is not the last one plus 1.
    """
    attention = attn_implementation(module)
    if attention == OURS or str(attention).startswith("flash"):
        return
    wanted = (
        f"packed rows ({name}) with attention {attention!r}, which sees documents by position_ids alone: "
        f"wanted position_ids that restart with each document and no attention_mask, or attention {OURS!r}"
    )
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        raise ValueError(wanted)
    if positions.dim() == 3:
        if positions.shape[0] != 4:
            raise ValueError(wanted)
        positions = positions[0]
    tokens, cu = positions.shape[-1], kwargs[name].flatten().long()
    if tokens < 2:
        return
    row = positions.reshape(-1, tokens)[0]
    first = cu.clamp(1, tokens - 1)
    inside = (cu > 0) & (cu < tokens)
    require((~inside | (row[first] != row[first - 1] + 1)).all(), wanted)
