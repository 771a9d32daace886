"""`attn_implementation="monograph"` for transformers: packed, padded and cached attention through one op.

    import monograph.hf.transformers.attention  # registers the name
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="monograph")

Document boundaries come from the collator (`cu_seq_lens_q`), from restarting position_ids or from a 2-D
padding mask; in every case a small table of offsets is made once per batch, and no dense mask exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from monograph.ops.attention_choice import Asked, attention_provider
from monograph.ops.providers import PORTABLE, choose
from monograph.ops.varlen_attention import varlen_attention
from monograph.packing.packed_rows_hook import require
from monograph.packing.stateful_layers import refuse_in_config
from monograph.upstream.transformers_names import attn_implementation, causal_mask_function

NAME = "monograph"

Number = int | torch.Tensor


def _closed(offsets: torch.Tensor, end: int) -> torch.Tensor:
    """`offsets` with `end` behind them. Not F.pad: its value is a number, which fixes a dynamic length."""
    return torch.cat((offsets, torch.zeros_like(offsets[:1]) + end))


def _table(cu_q: torch.Tensor, cu_k: torch.Tensor, key_lengths: torch.Tensor) -> torch.Tensor:
    """[1, 3, 1, documents + 1] int32: query offsets, key offsets, key lengths (the last entry unused).

    Of four dimensions, because `generate` makes it before the forward and hands it over as `attention_mask`:
    transformers takes a tensor of four as finished, one of two as padding.
    """
    lengths = torch.nn.functional.pad(key_lengths, (0, 1))
    return torch.stack((cu_q, cu_k, lengths)).to(torch.int32)[None, :, None]


def _is_table(mask: torch.Tensor) -> bool:
    return mask.dtype == torch.int32 and mask.dim() == 4 and tuple(mask.shape[:3]) == (1, 3, 1)


def packed_documents(seen_before: torch.Tensor) -> torch.Tensor:
    """The table of rows that restart their positions. seen_before[b, i]: token i + 1 of row b sees token i.

    As many slots as tokens, so that the shape does not depend on the data.
    """
    batch, tokens = seen_before.shape[0], seen_before.shape[1] + 1
    positions = torch.arange(batch * tokens, device=seen_before.device)
    starts = torch.nn.functional.pad(~seen_before, (1, 0), value=True).reshape(-1)
    begins = torch.where(starts, positions, batch * tokens).sort().values
    offsets = _closed(begins, batch * tokens)
    return _table(offsets, offsets, offsets[1:] - offsets[:-1])


def padded_documents(
    mask: torch.Tensor | None,
    batch: int,
    q_length: int,
    kv_length: int,
    first_query: Number,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The table of a batch of rows, each padded on one side or both: gap, document, gap per row.

    Query i of a row stands at key position first_query + i. Keys after the last query (an unfilled static
    cache) do not count. device: where the table is made if there is no mask.
    """
    device = device if mask is None else mask.device
    rows = torch.arange(batch, device=device)[:, None]
    end = first_query + q_length
    if mask is None:
        begin_k = torch.zeros_like(rows)
        end_k = torch.zeros_like(rows) + end
    else:
        begin_k = mask.int().argmax(dim=1, keepdim=True)
        end_k = begin_k + mask.sum(dim=1, keepdim=True)
    end_k = torch.minimum(end_k.clamp(max=kv_length), torch.zeros_like(rows) + end)
    begin_q = (begin_k - first_query).clamp(0, q_length)
    end_q = (end_k - first_query).clamp(0, q_length)
    cu_q = torch.cat((torch.zeros_like(rows), begin_q, end_q), dim=1) + rows * q_length
    cu_k = torch.cat((torch.zeros_like(rows), begin_k, end_k), dim=1) + rows * kv_length
    nothing = torch.zeros_like(rows)
    lengths = torch.cat((nothing, end_k - begin_k, nothing), dim=1)
    last_q = _closed(cu_q.reshape(-1), batch * q_length)
    last_k = _closed(cu_k.reshape(-1), batch * kv_length)
    return _table(last_q, last_k, lengths.reshape(-1))


def check_contiguous(mask: torch.Tensor) -> None:
    """A mask with holes cannot be told by two ends."""
    changes = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    outside = (~mask[:, 0]).int() + (~mask[:, -1]).int()
    whole = ~(changes > outside).any()
    require(whole, "monograph attention: attention_mask has holes; pad rows on the left or right only")


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Number = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> torch.Tensor | None:
    """What transformers calls instead of building a dense mask: a table of documents, None for whole rows."""
    if use_vmap:
        raise ValueError(
            "monograph attention: mask overlays (or_mask_function, and_mask_function) are not supported; "
            'use attn_implementation="sdpa"'
        )
    first_query = q_offset - kv_offset
    if attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        check_contiguous(mask)
        return padded_documents(mask, batch_size, q_length, kv_length, first_query)
    if isinstance(q_offset, torch.Tensor) or kv_length != q_length:
        return padded_documents(None, batch_size, q_length, kv_length, first_query, device)
    if mask_function is causal_mask_function or q_length < 2:
        return None
    # Rows that restart their position_ids: transformers put the boundaries into mask_function. Indices are
    # vectors, because a 0-d one would be read on the host and break the graph.
    positions = torch.arange(q_length, device=device)
    rows = torch.arange(batch_size, device=device)[:, None]
    seen = mask_function(rows, torch.zeros_like(rows), positions[None, 1:], positions[None, :-1])
    refuse_in_config(config, "restarting position_ids", seen.all())
    return packed_documents(seen.expand(batch_size, q_length - 1))


def _asked(model: PreTrainedModel) -> Asked:
    """What the config and the parameters of a model say about its attention."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return Asked(
        model.dtype,
        getattr(config, "qk_head_dim", None) or size,
        getattr(config, "v_head_dim", None) or size,
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        sinks=any(name.endswith(("sinks", ".sink")) for name, _ in model.named_parameters()),
    )


def device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def why_not_on(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why attention of this model is not computed there but by the portable form; None if it is."""
    nobody = "it has no kernel there and would compute every score"
    if device.type == "meta":
        return nobody
    try:
        provider = attention_provider(device, _asked(model))
    except ValueError as error:
        return str(error)
    asked = choose("varlen_attention", device.type).asked
    return nobody if provider == PORTABLE and not asked else None


def put_on(model: PreTrainedModel, wanted: bool | None) -> None:
    """Gives a model our attention. None: unless its user chose another, or its device has no kernel for it.

    A choice is known by its name: transformers gives `sdpa` to a model whose user said nothing, so any other
    name was chosen, and `sdpa` counts as not chosen.
    """
    device = device_of(model)
    chosen = attn_implementation(model)
    if wanted is False or (wanted is None and chosen not in (None, "sdpa")):
        return
    reason = why_not_on(model, device)
    if wanted and reason is not None:
        raise ValueError(
            f"attention=True on {device.type}: {reason}; wanted cpu, or attention=False to keep {chosen}"
        )
    if reason is None:
        model.set_attn_implementation(NAME)


def _cut(cu_q: torch.Tensor, batch: int, q_length: int) -> torch.Tensor:
    """Offsets of whole rows as those of the last `q_length` queries of each: in `generate` Gemma 4 computes
    layers that read the keys of others for the last token alone, and would cut the mask's third dimension."""
    whole = cu_q[-1:] // batch
    rows = (cu_q // whole.clamp(min=1)).clamp(max=batch - 1)
    return (rows * q_length + (cu_q - rows * whole - (whole - q_length)).clamp(min=0)).to(torch.int32)


def _refuse(
    module: torch.nn.Module, dropout: float, mask: torch.Tensor | None, options: dict[str, Any]
) -> None:
    chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if chunk is not None:
        raise ValueError(f"monograph attention: attention_chunk_size is {chunk}, which is not supported")
    if dropout:
        raise ValueError(f"monograph attention: attention dropout is {dropout}, only 0 is supported")
    if options.get("output_attentions"):
        raise ValueError('monograph attention: output_attentions needs attn_implementation="eager"')
    if mask is not None and not _is_table(mask):
        raise ValueError(
            f"monograph attention: a {mask.dim()}-D attention mask of {mask.dtype} is not supported, wanted "
            '[batch, tokens] padding; other masks need attn_implementation="sdpa"'
        )
    for name in ("position_bias", "head_mask"):
        if options.get(name) is not None:
            raise ValueError(f"monograph attention: {name} is not supported")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, length, size], key and value likewise; gives [batch, length, heads, size]."""
    _refuse(module, dropout, attention_mask, options)
    batch, heads, q_length, _ = query.shape
    kv_length = key.shape[2]
    lengths = None
    given = "cu_seq_lens_q" if cu_seqlens is None else "cu_seqlens"
    if cu_seqlens is not None:  # ours: padding is in no document, where flash's keywords make it one
        cu_seq_lens_q = cu_seq_lens_k = cu_seqlens
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise ValueError(f"monograph attention: packed documents in a batch of {batch} rows, wanted 1")
        refuse_in_config(getattr(module, "config", None), given)
        cu_q, cu_k = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
    elif attention_mask is not None:
        cu_q, cu_k, lengths = attention_mask[0, 0, 0], attention_mask[0, 1, 0], attention_mask[0, 2, 0, :-1]
        if getattr(module, "is_kv_shared_layer", False):
            cu_q = _cut(cu_q, batch, q_length)
    else:
        rows = torch.arange(batch + 1, device=query.device, dtype=torch.int32)
        cu_q, cu_k = rows * q_length, rows * kv_length
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal

    def by_token(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])

    out = varlen_attention(
        by_token(query),
        by_token(key),
        by_token(value),
        cu_q,
        cu_k,
        causal=causal,
        window=0 if sliding_window is None else sliding_window,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
        key_lengths=lengths,
    )
    return out.reshape(batch, q_length, heads, value.shape[3]), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
