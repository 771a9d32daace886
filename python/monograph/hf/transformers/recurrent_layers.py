"""Recurrent layers of transformers on our operators, documents kept apart: GatedDeltaNet and LFM2's conv.

    from monograph.hf.transformers.recurrent_layers import take_over
    take_over(model)         # mg.from_pretrained, MonographConfig and mg.optimize call it

A layer that is taken over gets a subclass of its class with the same name; parameters, files, caches and
hooks stay as they are. q and k are not repeated for grouped value heads. The formulas are in
docs/explain/recurrent.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from monograph.hf.transformers.recurrent_documents import (
    Documents,
    DocumentsHook,
    documents_of,
)
from monograph.ops.causal_conv1d import causal_conv1d
from monograph.ops.gated_delta_rule import gated_delta_rule
from monograph.ops.providers import may_take_over
from monograph.ops.rms_norm_gated import rms_norm_gated
from monograph.packing.stateful_layers import KeepsDocumentsApart, know_boundaries
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import hooks
from monograph.upstream.transformers_names import force_accelerate_hooks

# What a layer's forward is made of here. Where only the portable form computes one of them, the layer is
# transformers' own, with what transformers chose for the device. The gated norm is elementwise: where nobody
# has a kernel for it, the layer's own module computes it, and a compiler fuses it.
_DELTA_OPERATORS = ("causal_conv1d", "gated_delta_rule")
_CONV_OPERATORS = ("causal_conv1d",)


def _refuse_packed(layer: nn.Module, device: torch.device, given: dict[str, Any]) -> None:
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if given.get(name) is not None:
            raise ValueError(
                f"packed rows ({name}) with {type(layer).__name__} on {device.type}, where our operators "
                "have no kernels and the layer is transformers' own; wanted one document per row"
            )


def _masked(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return hidden if mask is None else (hidden * mask[:, :, None]).to(hidden.dtype)


def _convolved(
    layer: Any,
    conv: nn.Module,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    documents: Documents,
    cache: Any,
    silu: bool,
) -> torch.Tensor:
    """x [batch, tokens, channels] behind the convolution, as [batch * tokens, channels]."""
    if not isinstance(conv, nn.Conv1d):
        raise ValueError(
            f"the convolution is a {type(conv).__name__}, wanted nn.Conv1d: leave it out of "
            "target_modules and modules_to_save"
        )
    taps, state = conv.kernel_size[0], None
    if cache is not None:
        continued = cache.get_conv_state(layer.layer_idx, state_idx=0) is not None
        columns = _masked(x, mask).transpose(1, 2)
        known = cache.update_conv_state(columns, layer.layer_idx, conv_kernel_size=taps)
        if continued:
            before = known.shape[2] - x.shape[1]
            state = documents.states(known[:, :, before - taps + 1 : before])
    weight = conv.weight.squeeze(1)
    return causal_conv1d(x.flatten(0, 1), weight, conv.bias, documents.cu, state, silu=silu)[0]


def _sigmoid(b: torch.Tensor) -> torch.Tensor:
    """In float64, as `_log_decay`."""
    return b.double().sigmoid().to(b.dtype)


def _log_decay(a_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """g in float32. torch's exp has other last bits in the last elements of a tensor, or of a thread, than
    elsewhere: rounded from float64, a token's bits do not depend on where it stands."""
    g = -a_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    return g.to(torch.promote_types(torch.float32, dt_bias.dtype))


class DeltaNet(KeepsDocumentsApart):
    """What the layers share; `monograph_parts` is how each projects."""

    conv1d: nn.Module
    norm: Any
    out_proj: nn.Module
    layer_idx: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    monograph_operators = _DELTA_OPERATORS
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def monograph_parts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v side by side, the gate z, beta, and what the decay is computed from."""
        raise NotImplementedError

    def monograph_ends(self) -> tuple[Any, nn.Module]:
        return self.norm, self.out_proj

    # A graph decides it once, without a guard per module: torch keeps to hooks of tracing time, too. A
    # method, because torch 2.11 takes no module as an argument of such a function.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def monograph_may_pass_norm(self) -> bool:
        norm = self.monograph_ends()[0]
        return norm.activation == "silu" and not any(hooks(norm)) and "forward" not in norm.__dict__

    @force_accelerate_hooks("conv1d")  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not may_take_over(hidden_states.device.type, *_DELTA_OPERATORS):
            _refuse_packed(self, hidden_states.device, kwargs)
            return super().forward(hidden_states, cache_params, attention_mask, **kwargs)
        batch, tokens = hidden_states.shape[:2]
        hidden = _masked(hidden_states, attention_mask)
        documents = documents_of(hidden, attention_mask, cache_params is not None, kwargs)
        mixed, z, beta, a = self.monograph_parts(hidden)
        mixed = _convolved(self, self.conv1d, mixed, attention_mask, documents, cache_params, silu=True)
        q, k, v = mixed.split((self.key_dim, self.key_dim, self.value_dim), dim=1)
        g = _log_decay(self.A_log, a, self.dt_bias)
        start = None
        if cache_params is not None:
            start = documents.states(cache_params.get_recurrent_state(self.layer_idx, state_idx=0))
        out, final = gated_delta_rule(
            q.unflatten(1, (self.num_k_heads, self.head_k_dim)),
            k.unflatten(1, (self.num_k_heads, self.head_k_dim)),
            v.unflatten(1, (self.num_v_heads, self.head_v_dim)),
            g.flatten(0, 1),
            beta.flatten(0, 1),
            documents.cu,
            start,
            keep_state=cache_params is not None,
        )
        if cache_params is not None:
            cache_params.update_recurrent_state(documents.of_rows(final), self.layer_idx)
        norm, project = self.monograph_ends()
        z = z.reshape(out.shape)
        ours = may_take_over(out.device.type, "rms_norm_gated")
        if ours and self.monograph_may_pass_norm():
            y = rms_norm_gated(out, z, norm.weight, eps=norm.variance_epsilon)
        else:
            y = norm(out.flatten(0, 1), z.flatten(0, 1))
        return project(y.reshape(batch, tokens, self.value_dim))


class Qwen3NextDeltaNet(DeltaNet):
    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module
    fix_query_key_value_ordering: Any

    def monograph_parts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkvz, ba = self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(qkvz, ba)
        return torch.cat([t.flatten(2) for t in (q, k, v)], dim=2), z, _sigmoid(b), a


class Qwen35DeltaNet(DeltaNet):
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module

    def monograph_parts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed, z = self.in_proj_qkv(hidden), self.in_proj_z(hidden)
        return mixed, z, _sigmoid(self.in_proj_b(hidden)), self.in_proj_a(hidden)


class OlmoHybridDeltaNet(DeltaNet):
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    a_proj: nn.Module
    b_proj: nn.Module
    g_proj: nn.Module
    o_norm: Any
    o_proj: nn.Module
    allow_neg_eigval: bool

    def monograph_parts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = torch.cat([project(hidden) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=2)
        beta = _sigmoid(self.b_proj(hidden))
        return mixed, self.g_proj(hidden), 2.0 * beta if self.allow_neg_eigval else beta, self.a_proj(hidden)

    def monograph_ends(self) -> tuple[Any, nn.Module]:
        return self.o_norm, self.o_proj


class ShortConv(KeepsDocumentsApart):
    """LFM2: a convolution between two gates, without an activation."""

    conv: nn.Module
    in_proj: nn.Module
    out_proj: nn.Module
    monograph_operators = _CONV_OPERATORS

    @force_accelerate_hooks("conv")  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not may_take_over(hidden_states.device.type, *_CONV_OPERATORS):
            _refuse_packed(self, hidden_states.device, kwargs)
            return super().forward(hidden_states, past_key_values, attention_mask, **kwargs)
        hidden = _masked(hidden_states, attention_mask)
        documents = documents_of(hidden, attention_mask, past_key_values is not None, kwargs)
        before, behind, x = self.in_proj(hidden).chunk(3, dim=2)
        y = _convolved(self, self.conv, before * x, attention_mask, documents, past_key_values, silu=False)
        return self.out_proj(behind * y.view(behind.shape))


_LAYERS: dict[str, type[DeltaNet] | type[ShortConv]] = {
    "Qwen3NextGatedDeltaNet": Qwen3NextDeltaNet,
    "Qwen3_5GatedDeltaNet": Qwen35DeltaNet,
    "Qwen3_5MoeGatedDeltaNet": Qwen35DeltaNet,
    "OlmoHybridGatedDeltaNet": OlmoHybridDeltaNet,
    "Lfm2ShortConv": ShortConv,
    "Lfm2MoeShortConv": ShortConv,
}


# What the operators compute; layers beyond it stay transformers' own, and then refuse packed rows.
MOST_HEAD, MOST_TAPS = 256, 8


def _taps(module: Any) -> int:
    return max((m.kernel_size[0] for m in module.modules() if isinstance(m, nn.Conv1d)), default=1)


def _take(module: Any) -> bool:
    ours = _LAYERS.get(type(module).__name__)
    known = (
        ours is not None
        and type(module).__module__.startswith("transformers.models.")
        and "forward" not in module.__dict__
        and getattr(module, "activation", "silu") == "silu"
        and all(1 <= getattr(module, name, 1) <= MOST_HEAD for name in ("head_k_dim", "head_v_dim"))
        and _taps(module) <= MOST_TAPS
        and all(may_take_over(p.device.type, *ours.monograph_operators) for p in module.parameters())
    )
    if known and ours is not None:
        put_before(ours, module)
    return known


def take_over(model: nn.Module) -> int:
    """Gives the layers of known kinds our forward, and the models around them the hook that finds documents.

    Left alone are layers on a device that the operators have no kernels for; `guard_packed` then has the
    model refuse packed rows. Says how many there are; called again, it counts them again.
    """
    taken = sum(isinstance(module, KeepsDocumentsApart) or _take(module) for module in list(model.modules()))
    for module in model.modules() if taken else ():
        if isinstance(module, PreTrainedModel) and "finds_documents" not in vars(module):
            vars(module)["finds_documents"] = True
            module.register_forward_pre_hook(DocumentsHook(), with_kwargs=True)
            know_boundaries(module)
    return taken
