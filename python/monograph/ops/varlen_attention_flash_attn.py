"""monograph::varlen_attention by the library flash-attn: what torch's has not, soft-caps above all."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from monograph.ops.attention_choice import asked_of, capability_of, why_not_flash_attn
from monograph.ops.flash_documents import (
    Flash,
    checked_call,
    flash_attention,
    flash_attention_backward,
)
from monograph.upstream.flash_attn_names import varlen_backward, varlen_forward

_MULTIPLE = 8  # of a head's size


def _padded(t: torch.Tensor) -> torch.Tensor:
    return pad(t, (0, -t.shape[-1] % _MULTIPLE))


class _FlashAttn:
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flash: Flash
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _, _ = varlen_forward(
            _padded(q),
            _padded(k),
            _padded(v),
            flash.cu_q,
            flash.cu_k,
            *flash.longest,
            0.0,
            flash.scale,
            causal=flash.window == (-1, 0),
            window_size_left=flash.window[0],
            window_size_right=flash.window[1],
            softcap=flash.softcap,
        )
        return out[..., : q.shape[-1]], lse

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
        size = q.shape[-1]
        dout, q, k, v, out = (_padded(t) for t in (dout, q, k, v, out))
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            flash.cu_q,
            flash.cu_k,
            *flash.longest,
            0.0,
            flash.scale,
            flash.window == (-1, 0),
            *flash.window,
            flash.softcap,
            None,
            torch.are_deterministic_algorithms_enabled(),
        )
        return dq[..., :size], dk[..., :size], dv[..., :size]


def why_not(operator: str, first: torch.Tensor, *rest: Any) -> str | None:
    asked = asked_of(operator, first, *rest)
    return why_not_flash_attn(asked, capability_of(first.device))


def varlen_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_attention(_FlashAttn(), checked_call("varlen_attention", *arguments))


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
    return flash_attention_backward(_FlashAttn(), dout, out, lse, call)
