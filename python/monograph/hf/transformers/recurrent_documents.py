"""Where documents begin and end for layers with state: what a call of a model says, and what a layer reads.

The collator's `cu_seqlens` comes first, then flash attention's `cu_seq_lens_q`, then position_ids that
restart, then a padding mask. Whatever of it the layers could not follow is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from monograph.hf.transformers.attention import check_contiguous, packed_documents
from monograph.packing.packed_rows_hook import falls, require
from monograph.packing.unsupported_attention import check_attention_sees

_GIVEN = ("cu_seqlens", "cu_seq_lens_q")  # ours first: there padding is in no document
_NO_LAST = (
    "a row whose newest token is masked, with a cache: wanted padding on the left and, where a prompt comes "
    "in pieces (prefill_chunk_size), a token of each row in each piece"
)
_ONE_ROW = "batch size is expected to be 1 with packed rows"


class Documents(NamedTuple):
    """`cu` as the operators take it; every `step`-th document is a row's, those between are padding."""

    cu: torch.Tensor
    step: int

    def states(self, of_rows: torch.Tensor | None) -> torch.Tensor | None:
        """The states of rows [batch, ...] as those of documents."""
        if of_rows is None or self.step == 1:
            return of_rows
        return torch.stack((of_rows, torch.zeros_like(of_rows)), 1).flatten(0, 1)[:-1]

    def of_rows(self, states: torch.Tensor) -> torch.Tensor:
        return states if self.step == 1 else states[:: self.step]


def documents_of(
    hidden: torch.Tensor, mask: torch.Tensor | None, cached: bool, given: dict[str, Any]
) -> Documents:
    """Of rows [batch, tokens, size] with a padding mask [batch, tokens], if any, and a call's keywords."""
    batch, tokens = hidden.shape[:2]
    for name in _GIVEN:
        if (cu := given.get(name)) is not None:
            if batch != 1:
                raise ValueError(f"packed rows ({name}) in a batch of {batch} rows: {_ONE_ROW}")
            if cached:
                raise ValueError(f"packed rows ({name}) with a cache, wanted use_cache=False")
            return Documents(cu, 1)
    if given.get("seq_idx") is not None:
        raise ValueError("packed rows (seq_idx) without cu_seqlens, wanted cu_seqlens (PackedCollator)")
    rows = torch.arange(batch + 1, device=hidden.device, dtype=torch.int32) * tokens
    if mask is None:
        return Documents(rows, 1)
    padded = mask.bool()
    check_contiguous(padded)
    if cached:
        require(padded[:, -1].all(), _NO_LAST)
    begin = padded.int().argmax(1)
    ends = torch.stack((begin, begin + padded.sum(1)), 1) + rows[:-1, None]
    return Documents(ends.flatten().to(torch.int32), 2)


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any], positions: torch.Tensor) -> int:
    for tensor in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(tensor, torch.Tensor):
            return tensor.shape[0]
    return positions.shape[-2]


class DocumentsHook:
    """A forward pre-hook of a model: position_ids that restart become `cu_seqlens`, or are refused.

    With a cache or a padding mask transformers takes a row for one document, so it has to be one. Offsets
    that only the layers with state would follow are refused, too.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = kwargs.get("position_ids")
        packed = [name for name in _GIVEN if kwargs.get(name) is not None]
        mask = kwargs.get("attention_mask")
        if kwargs.get("past_key_values") is not None and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # transformers gives layers with state no mask behind the first piece.
            require((mask[:, -1] != 0).all(), _NO_LAST)
        if packed:
            check_attention_sees(module, packed[0], kwargs)
        if packed or positions is None or positions.shape[-1] < 2:
            return None
        what = "packed rows (restarting position_ids)"
        one_document = f"{what} with a cache or an attention_mask, wanted use_cache=False and no mask"
        cached = kwargs.get("use_cache")
        if cached is None:
            config = getattr(module.config, "text_config", module.config)
            cached = bool(getattr(config, "use_cache", False))
        if cached or any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values")):
            require(~falls(positions).any(), one_document)
            return None
        if positions.dim() == 3 and positions.shape[0] != 4:  # of 4 the first counts tokens of text
            require(~falls(positions).any(), f"{what} of three dimensions without cu_seqlens, wanted both")
            return None
        positions = positions[0] if positions.dim() == 3 else positions
        seen = positions[:, 1:] == positions[:, :-1] + 1  # as transformers tells documents
        rows = _rows(args, kwargs, positions)
        if rows != 1:
            require(seen.all(), f"{what} in a batch of {rows} rows: {_ONE_ROW}")
            return None
        return args, {**kwargs, "cu_seqlens": packed_documents(seen)[0, 0, 0]}
