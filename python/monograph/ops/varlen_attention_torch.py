"""monograph::varlen_attention by `torch.nn.attention.varlen`, flash attention of torch."""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops.attention_choice import asked_of, capability_of, why_not_varlen
from monograph.ops.flash_documents import (
    Flash,
    checked_call,
    flash_attention,
    flash_attention_backward,
)
from monograph.upstream.torch_names import varlen_backward


class _Torch:
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flash: Flash
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        found: Any = varlen_attn(
            q,
            k,
            v,
            flash.cu_q,
            flash.cu_k,
            *flash.longest,
            return_aux=AuxRequest(lse=True),
            scale=flash.scale,
            window_size=flash.window,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return found

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
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
        causal = flash.window == (-1, 0)
        found: Any = varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            flash.cu_q,
            flash.cu_k,
            *flash.longest,
            causal,
            random,
            flash.scale,
            list(flash.window),
        )
        return found


def why_not(operator: str, first: torch.Tensor, *rest: Any) -> str | None:
    asked = asked_of(operator, first, *rest)
    return why_not_varlen(asked, capability_of(first.device))


def varlen_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attention(_Torch(), checked_call("varlen_attention", *arguments))


def varlen_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = checked_call("varlen_attention_backward", q, k, v, *rest)
    return flash_attention_backward(_Torch(), dout, out, lse, call)
