"""monograph::causal_conv1d by the library flash-linear-attention, its kernels and their own backward.

Weight and bias go in as float32, and so do their gradients come out. Its states have a place more than ours,
the oldest, which it does not read. Rows outside documents are set to 0. The host reads the number of chunks,
as gated_delta_rule_fla.py says.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from monograph.ops.argument_checks import (
    check_float,
    check_optional_tensors,
    check_shape,
    dtype_name,
    require,
)
from monograph.ops.attention_choice import capability_of
from monograph.ops.documents import chunks_of, inside_documents
from monograph.ops.offload_marks import stays_here

CHUNK = 64
TAPS = (2, 4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY = (8, 0)


def why_not(operator: str, first: torch.Tensor, *rest: Any) -> str | None:
    x, weight = (first, rest[0]) if operator == "causal_conv1d" else rest[1:3]
    if x.dtype not in DTYPES:
        return f"the dtype is {dtype_name(x.dtype)}, wanted bfloat16, float16 or float32"
    if not TAPS[0] <= weight.shape[-1] <= TAPS[1]:
        return f"there are {weight.shape[-1]} taps, wanted {TAPS[0]} to {TAPS[1]}"
    capability = capability_of(first.device)
    if capability < CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}, wanted 8.0 or more"
    return None


def note(device: torch.device) -> str:
    """What an owner should know of this card."""
    return "the host reads the number of chunks in each call"


def _checked(op: str, *tensors: Any) -> None:
    from monograph.ops.causal_conv1d import check_arguments  # which imports the table of providers

    check_arguments(op, *tensors)


def _run(leaves: Sequence[Any], cu: torch.Tensor, chunks: torch.Tensor, silu: bool, keep: bool) -> Any:
    x, weight, bias, state = leaves
    return importlib.import_module("fla.modules.causal_conv1d").causal_conv1d(
        x,
        weight,
        bias,
        initial_state=state,
        output_final_state=keep,
        activation="silu" if silu else None,
        cu_seqlens=cu.to(torch.int64),
        chunk_indices=chunks,
    )


def _leaves(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """What the library is given: of these it may differentiate."""
    return [
        x.detach()[None].contiguous(),
        weight.detach().float().contiguous(),
        None if bias is None else bias.detach().float().contiguous(),
        None if state is None else pad(state.detach(), (1, 0)),
    ]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    silu: bool,
    keep_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _checked("causal_conv1d", x, weight, bias, cu, state)
    chunks, documents = chunks_of(cu, CHUNK), cu.numel() - 1
    final = x.new_zeros([documents if keep_state else 0, x.shape[1], weight.shape[1] - 1])
    if chunks.shape[0] == 0:  # no tokens in any document
        return x.new_zeros(x.shape), state.clone() if keep_state and state is not None else final
    y, found = _run(_leaves(x, weight, bias, state), cu, chunks, silu, keep_state)
    y = torch.where(inside_documents(cu, x.shape[0])[:, None], y[0], 0)
    return y.contiguous(), found[..., 1:].to(x.dtype).contiguous() if keep_state else final


def causal_conv1d_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    silu: bool,
    need: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    op = "causal_conv1d_backward"
    _checked(op, x, weight, bias, cu, state)
    check_optional_tensors(op, x, dy=dy, dfinal=dfinal)
    check_float(op, "dy", dy, x.dtype)
    check_shape(op, "dy", dy, x.shape)
    shape = [cu.numel() - 1, x.shape[1], weight.shape[1] - 1]
    if dfinal is not None:
        check_float(op, "dfinal", dfinal, x.dtype)
        check_shape(op, "dfinal", dfinal, shape)
    require(len(need) == 4, op, f"need has {len(need)} entries, wanted 4")
    inside, chunks = inside_documents(cu, x.shape[0])[:, None], chunks_of(cu, CHUNK)
    leaves = _leaves(x, weight, bias, state)
    asked = [i for i, leaf in enumerate(leaves) if leaf is not None and need[i]]
    kinds = (x.dtype, torch.float32, torch.float32, x.dtype)
    grads = [x.new_empty(0, dtype=kind) for kind in kinds]
    if chunks.shape[0] == 0:
        for i in asked:
            grads[i] = torch.zeros((x, weight, bias, state)[i].shape, dtype=kinds[i], device=x.device)  # type: ignore[union-attr]
        if 3 in asked and dfinal is not None:
            grads[3] = dfinal.clone()
        return tuple(grads)
    wanted = [leaf.requires_grad_() for i, leaf in enumerate(leaves) if leaf is not None and i in asked]
    if not wanted:
        return tuple(grads)
    with torch.enable_grad(), stays_here():
        y, final = _run(leaves, cu, chunks, silu, dfinal is not None)
    given = [torch.where(inside, dy, 0)[None].contiguous()]
    if dfinal is not None:
        given.append(pad(dfinal, (1, 0)))
    found = torch.autograd.grad([y, final][: len(given)], wanted, given)
    for i, gradient in zip(asked, found, strict=True):
        grads[i] = gradient.to(kinds[i])
    if 0 in asked:
        grads[0] = torch.where(inside, grads[0][0], 0).contiguous()
    if 3 in asked:
        grads[3] = grads[3][..., 1:].contiguous()
    return tuple(grads)
