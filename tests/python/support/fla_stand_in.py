"""Functions of flash-linear-attention 0.6 by their names and arguments, computed by our portable operators.

They ask what its kernels ask (one row of a batch, contiguous, g in float32, offsets in int64, the chunks of
them), and leave what those leave unwritten as NaN. `install` gives them to `import fla` and to the table.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch

from monograph.ops import providers
from monograph.ops.causal_conv1d import portable_causal_conv1d, portable_causal_conv1d_backward
from monograph.ops.documents import chunks_of, inside_documents
from monograph.ops.gated_delta_rule import portable_gated_delta_rule, portable_gated_delta_rule_backward
from support.provider_rows import give_row

calls: list[str] = []


def _expect(cu: torch.Tensor, chunks: torch.Tensor | None, *tensors: torch.Tensor | None) -> torch.Tensor:
    assert cu.dtype == torch.int64
    own = cu.to(torch.int32)
    if chunks is not None:
        assert torch.equal(chunks, chunks_of(own, 64))
        assert len(chunks) > 0
    for t in tensors:
        assert t is None or t.is_contiguous()
    return own


def _unwritten(rows: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[~inside_documents(cu, rows.shape[0])] = float("nan")
    return rows[None]


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *options: Any) -> Any:
        scale, keep, l2norm, cu = options
        tensors: Any = [t[0] for t in (q, k, v, g, beta)]
        ctx.save_for_backward(*tensors, cu, state)
        ctx.options = scale, l2norm
        given: Any = (*tensors, cu, state, scale, l2norm, keep)
        out, final = portable_gated_delta_rule(*given)
        return _unwritten(out, cu), final if keep else None

    @staticmethod
    def backward(ctx: Any, dout: Any, dfinal: Any) -> Any:
        tensors: Any
        *tensors, cu, state = ctx.saved_tensors
        assert dout.isfinite().all()
        given: Any = (dout[0], dfinal, *tensors, cu, state, *ctx.options)
        *rows, dstate = portable_gated_delta_rule_backward(*given)
        return *(_unwritten(d, cu) for d in rows), None if state is None else dstate, *[None] * 4


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    chunk_indices: Any = None,
) -> Any:
    calls.append("chunk")
    cu = _expect(cu_seqlens, chunk_indices, q, k, v, g, beta, initial_state)
    assert g.dtype == torch.float32
    assert chunk_indices is not None
    rest = (initial_state, scale, output_final_state, use_qk_l2norm_in_kernel, cu)
    return _Rule.apply(q, k, v, g, beta, *rest)


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> Any:
    calls.append("recurrent")
    cu = _expect(cu_seqlens, None, q, k, v, g, beta, initial_state)
    rest = (initial_state, scale, output_final_state, use_qk_l2norm_in_kernel, cu)
    with torch.no_grad():
        return _Rule.apply(q, k, v, g, beta, *rest)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, state: Any, keep: bool, silu: bool, cu: Any) -> Any:
        ctx.save_for_backward(x, weight, bias, state, cu)
        ctx.silu = silu
        own = None if state is None else state[..., 1:]
        y, final = portable_causal_conv1d(x[0], weight, bias, cu, own, silu, keep)
        return _unwritten(y, cu), torch.nn.functional.pad(final, (1, 0), value=torch.nan) if keep else None

    @staticmethod
    def backward(ctx: Any, dy: Any, dfinal: Any) -> Any:
        x, weight, bias, state, cu = ctx.saved_tensors
        assert dy.isfinite().all()
        own = None if state is None else state[..., 1:]
        last = None if dfinal is None else dfinal[..., 1:]
        need = [True, True, bias is not None, state is not None]
        ds: Any
        dx, dw, db, ds = portable_causal_conv1d_backward(
            dy[0], last, x[0], weight, bias, cu, own, ctx.silu, need
        )
        ds = None if state is None else torch.nn.functional.pad(ds, (1, 0), value=torch.nan)
        return _unwritten(dx, cu), dw, None if bias is None else db, ds, None, None, None


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: Any = None,
    chunk_indices: Any = None,
) -> Any:
    calls.append("conv")
    assert residual is None
    assert activation in (None, "silu")
    cu = _expect(cu_seqlens, chunk_indices, x, weight, bias, initial_state)
    options = (output_final_state, activation == "silu", cu)
    return _Conv.apply(x, weight, bias, initial_state, *options)


def install(monkeypatch: pytest.MonkeyPatch, *devices: str) -> list[str]:
    """Until the test ends it is there, and first in its rows on these devices. Gives its calls, none yet."""
    for name, functions in (
        ("fla", ()),
        ("fla.ops", ()),
        ("fla.modules", ()),
        ("fla.ops.gated_delta_rule", (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)),
        ("fla.modules.causal_conv1d", (causal_conv1d,)),
    ):
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
    providers._looked_up.cache_clear()
    for device in devices:
        for operator in ("gated_delta_rule", "causal_conv1d"):
            give_row(monkeypatch, operator, device, "fla", "portable")
    calls.clear()
    return calls
