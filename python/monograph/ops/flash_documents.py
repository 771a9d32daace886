"""monograph::varlen_attention and its gradients by flash attention, torch's or flash-attn's, for CUDA.

Nothing of it reads the device: offsets stay where they are, and lengths are bounded by shapes. Differences to
our kernel: the gradient of queries is summed by atomic additions, in an order that changes from run to run
unless `torch.use_deterministic_algorithms(True)`; a NaN may reach earlier tokens of its own document.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of [rows]: whether it is in a document; whether it is among the first `lengths` of one that has
    `others` to see."""
    count = offsets.numel() - 1
    document = document_of(offsets, rows)
    known = document.clamp(0, max(count - 1, 0))
    place = torch.arange(rows, device=offsets.device) - offsets[known]
    inside = (document >= 0) & (document < count)
    return inside, inside & (place < lengths[known]) & (others[known] > 0)


class Call(NamedTuple):
    """The arguments of the operator behind those of its gradient."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    key_lengths: torch.Tensor | None
    sinks: torch.Tensor | None
    causal: bool
    window: int
    scale: float
    softcap: float


def checked_call(op: str, *arguments: Any) -> Call:
    from monograph.ops.varlen_attention import check_arguments  # which imports the table of providers

    call = Call(*arguments)
    tensors = call.q, call.k, call.v, call.cu_q, call.cu_k, call.key_lengths, call.sinks
    check_arguments(op, *tensors, call.window, call.scale, call.softcap)
    return call


class Flash(NamedTuple):
    """What a library is given: offsets under which every row is in a document, bounds of their lengths, and
    the keys before and behind a query's place that it sees, -1 for all."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest: tuple[int, int]
    window: tuple[int, int]
    scale: float
    softcap: float


class Library(Protocol):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flash: Flash
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp [heads, tokens], infinity where a query sees no key."""

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        flash: Flash,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v."""


class _Documents:
    """Which rows count, and what the library is given."""

    def __init__(self, call: Call) -> None:
        queries = call.cu_q[1:] - call.cu_q[:-1]
        seen = call.cu_k[1:] - call.cu_k[:-1] if call.key_lengths is None else call.key_lengths
        self.inside, queries_that_see = _of_documents(call.cu_q, queries, seen, call.q.shape[0])
        _, keys_that_are_seen = _of_documents(call.cu_k, seen, queries, call.k.shape[0])
        self.queries = queries_that_see[:, None, None]
        self.keys = keys_that_are_seen[:, None, None]
        rows = call.q.shape[0], call.k.shape[0]
        left = call.window - 1 if call.window > 0 else -1  # ours counts the query's own place
        window = (left, 0 if call.causal else left)
        closed = closed_offsets(call.cu_q, call.cu_k, call.key_lengths, *rows)
        self.flash = Flash(*closed, rows, window, call.scale, call.softcap)
        # Of queries without keys, keys without queries and rows of no document nothing comes through.
        self.q = torch.where(self.queries, call.q, 0.0)
        self.k, self.v = (torch.where(self.keys, t, 0.0) for t in (call.k, call.v))


def flash_attention(library: Library, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, 0 for rows without keys, and its log-sum-exp, with minus infinity as our kernel has it."""
    given = _Documents(call)
    out, lse = library.forward(given.q, given.k, given.v, given.flash)
    none = (lse == torch.inf) | ~given.queries[:, 0, 0]
    lse = torch.where(given.inside, torch.where(none, -torch.inf, lse), 0.0)
    return torch.where(given.queries, out, 0.0), lse


def flash_attention_backward(
    library: Library, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v; there are no sinks."""
    given = _Documents(call)
    dout = torch.where(given.queries, dout, 0.0)
    # exp(score - infinity) is 0: what sees no key, and rows that are in no document.
    lse = torch.where((lse == -torch.inf) | ~given.queries[:, 0, 0], torch.inf, lse)
    grads = library.backward(dout, given.q, given.k, given.v, out, lse, given.flash)
    found = [
        torch.where(rows, t, 0.0)
        for rows, t in zip((given.queries, given.keys, given.keys), grads, strict=True)
    ]
    return found[0], found[1], found[2], lse.new_empty(0)
