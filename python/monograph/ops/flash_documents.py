"""varlen_attention by `torch.nn.attention.varlen`, flash attention of torch, for CUDA devices.

Nothing of it reads the device: offsets stay where they are, and lengths are bounded by shapes. Differences to
our operator: the gradient of queries is summed by atomic additions, in an order that changes from run to run
unless `torch.use_deterministic_algorithms(True)`; a NaN may reach earlier tokens of its own document.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops.documents import document_of


def closed_offsets(
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_lengths: torch.Tensor | None,
    queries: int,
    keys: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets under which every row is in a document: flash attention leaves others as memory was found.

    Rows before the first document and behind the last become documents of their own; so do keys behind
    key_lengths, without queries.
    """
    if key_lengths is not None:
        ends = torch.stack((cu_k[:-1] + key_lengths, cu_k[1:]), dim=1).reshape(-1)
        cu_k = torch.cat((cu_k[:1], ends))
        cu_q = torch.cat((cu_q[:1], cu_q[1:].repeat_interleave(2)))

    def closed(offsets: torch.Tensor, end: int) -> torch.Tensor:
        zero = torch.zeros_like(offsets[:1])
        return torch.cat((zero, offsets, zero + end)).to(torch.int32)

    return closed(cu_q, queries), closed(cu_k, keys)


def _of_documents(
    offsets: torch.Tensor, lengths: torch.Tensor, others: torch.Tensor, rows: int
) -> torch.Tensor:
    """[rows, 1, 1]: True for the first `lengths` rows of each document that has `others` to see."""
    count = offsets.numel() - 1
    document = document_of(offsets, rows)
    known = document.clamp(0, max(count - 1, 0))
    place = torch.arange(rows, device=offsets.device) - offsets[known]
    found = (document >= 0) & (document < count) & (place < lengths[known]) & (others[known] > 0)
    return found[:, None, None]


def flash_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    key_lengths: torch.Tensor | None,
    *,
    causal: bool,
    window: int,
    scale: float,
    longest: tuple[int, int] | None = None,
) -> torch.Tensor:
    """As `varlen_attention`. longest: bounds of the queries and keys of a document; all tokens without it."""
    from torch.nn.attention.varlen import varlen_attn

    queries = cu_q[1:] - cu_q[:-1]
    seen = queries if cu_k is cu_q and key_lengths is None else key_lengths
    seen = cu_k[1:] - cu_k[:-1] if seen is None else seen
    inside = _of_documents(cu_q, queries, seen, q.shape[0])
    if seen is not queries:
        # Queries without keys and keys without queries: whatever their gradients are, they count as 0.
        of_keys = _of_documents(cu_k, seen, queries, k.shape[0])
        q, k, v = torch.where(inside, q, 0.0), torch.where(of_keys, k, 0.0), torch.where(of_keys, v, 0.0)
    offsets_q, offsets_k = closed_offsets(cu_q, cu_k, key_lengths, q.shape[0], k.shape[0])
    max_q, max_k = longest or (q.shape[0], k.shape[0])
    left = window - 1 if window > 0 else -1  # ours counts the query's own place
    out: Any = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        offsets_q,
        offsets_k,
        max_q,
        max_k,
        scale=scale,
        window_size=(left, 0 if causal else left),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return torch.where(inside, out, 0.0)
