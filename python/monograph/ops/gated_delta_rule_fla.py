"""monograph::gated_delta_rule by the library flash-linear-attention.

Its chunked kernels compute forward and, by their own backward, the gradients; its recurrent one computes
calls with one token for each document. g goes in as float32. The library reads nothing outside documents and
leaves such rows as memory was found: they are set to 0. The host reads the number of chunks, once for each
call: what the library keeps for offsets that it has seen is not used, as they may change where they lie.

Gradients come from a second run of its forward, which keeps more than our operator saves.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from monograph.ops.argument_checks import check_float, check_optional_tensors, check_shape, dtype_name
from monograph.ops.attention_choice import capability_of
from monograph.ops.documents import chunks_of, inside_documents
from monograph.ops.offload_marks import stays_here

CHUNK = 64
DTYPES = (torch.bfloat16, torch.float16)
SIZES = 256
CAPABILITY = (8, 0)


class _Call(NamedTuple):
    """The arguments of the operator."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    cu: torch.Tensor
    state: torch.Tensor | None
    scale: float
    l2norm: bool
    keep_state: bool


def why_not(operator: str, first: torch.Tensor, *rest: Any) -> str | None:
    q, _, v = (first, *rest)[:3] if operator == "gated_delta_rule" else rest[1:4]
    if q.dtype not in DTYPES:
        found = dtype_name(q.dtype)
        return f"the dtype is {found}, wanted bfloat16 or float16: fla would multiply float32 as TF32"
    for what, size in (("keys", q.shape[-1]), ("values", v.shape[-1])):
        if size > SIZES or size % 2:
            return f"the size of a head of {what} is {size}, wanted an even one up to {SIZES}"
    capability = capability_of(first.device)
    if capability < CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}, wanted 8.0 or more"
    return None


def note(device: torch.device) -> str:
    """What an owner should know of this card."""
    return "the host reads the number of chunks in each call"


def _library(name: str) -> Any:
    return getattr(importlib.import_module("fla.ops.gated_delta_rule"), name)


def _checked(op: str, *arguments: Any) -> _Call:
    from monograph.ops.gated_delta_rule import check_arguments  # which imports the table of providers

    call = _Call(*arguments)
    check_arguments(op, call.q, call.k, call.v, call.g, call.beta, call.cu, call.state, call.scale)
    return call


def _masked(rows: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    return torch.where(inside.reshape(-1, *[1] * (rows.dim() - 1)), rows, 0)


def _rows(call: _Call) -> list[torch.Tensor]:
    """q, k, v, g and beta as the one row of a batch."""
    tensors = (call.q, call.k, call.v, call.g.float(), call.beta)
    return [t.detach()[None].contiguous() for t in tensors]


def _chunked(call: _Call, rows: list[torch.Tensor], state: Any, keep: bool, chunks: torch.Tensor) -> Any:
    return _library("chunk_gated_delta_rule")(
        *rows,
        scale=call.scale,
        initial_state=state,
        output_final_state=keep,
        use_qk_l2norm_in_kernel=call.l2norm,
        cu_seqlens=call.cu.to(torch.int64),
        chunk_indices=chunks,
    )


def gated_delta_rule(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _checked("gated_delta_rule", *arguments)
    tokens, documents = call.q.shape[0], call.cu.numel() - 1
    one_each = 0 < tokens <= documents
    chunks = None if one_each else chunks_of(call.cu, CHUNK)
    shape = [documents if call.keep_state else 0, call.v.shape[1], call.q.shape[2], call.v.shape[2]]
    final = call.v.new_zeros(shape, dtype=torch.float32)
    if chunks is not None and chunks.shape[0] == 0:  # no tokens in any document
        if call.keep_state and call.state is not None:
            final = call.state.clone()
        return torch.zeros_like(call.v, memory_format=torch.contiguous_format), final
    if chunks is None:
        out, found = _library("fused_recurrent_gated_delta_rule")(
            *_rows(call)[:4],
            beta=call.beta[None].contiguous(),
            scale=call.scale,
            initial_state=call.state,
            output_final_state=call.keep_state,
            use_qk_l2norm_in_kernel=call.l2norm,
            cu_seqlens=call.cu.to(torch.int64),
        )
    else:
        out, found = _chunked(call, _rows(call), call.state, call.keep_state, chunks)
    out = _masked(out[0], inside_documents(call.cu, tokens)).to(call.v.dtype)
    return out.contiguous(), found if call.keep_state else final


def gated_delta_rule_backward(
    dout: torch.Tensor, dfinal: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    op = "gated_delta_rule_backward"
    call = _checked(op, *arguments, dfinal is not None)
    check_optional_tensors(op, call.q, dout=dout, dfinal=dfinal)
    check_float(op, "dout", dout, call.v.dtype)
    check_shape(op, "dout", dout, call.v.shape)
    shape = [call.cu.numel() - 1, call.v.shape[1], call.q.shape[2], call.v.shape[2]]
    if dfinal is not None:
        check_float(op, "dfinal", dfinal, torch.float32)
        check_shape(op, "dfinal", dfinal, shape)
    inside = inside_documents(call.cu, call.q.shape[0])
    chunks = chunks_of(call.cu, CHUNK)
    like = (call.q, call.k, call.v, call.g, call.beta)
    if chunks.shape[0] == 0:
        nothing = call.v.new_zeros(shape if call.state is not None else [0, *shape[1:]], dtype=torch.float32)
        handed_on = call.state is not None and dfinal is not None
        return *(torch.zeros_like(t) for t in like), dfinal.clone() if handed_on else nothing  # type: ignore[union-attr]
    leaves = [t.requires_grad_() for t in _rows(call)]
    start = None if call.state is None else call.state.detach().clone().requires_grad_()
    with torch.enable_grad(), stays_here():
        out, final = _chunked(call, leaves, start, call.keep_state, chunks)
    given = [_masked(dout, inside)[None].contiguous(), *([] if dfinal is None else [dfinal.contiguous()])]
    wanted = leaves if start is None else [*leaves, start]
    found = torch.autograd.grad([out, final][: len(given)], wanted, given)
    rows = [_masked(d[0], inside).to(t.dtype).contiguous() for d, t in zip(found, like, strict=False)]
    return *rows, found[5] if start is not None else call.v.new_zeros([0, *shape[1:]], dtype=torch.float32)
