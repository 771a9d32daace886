"""Decoder layers of a transformers model whose first residual sum is part of the norm behind it.

    s = hidden + attention(input_norm(hidden));  y = s + mlp(norm(s))

Norms behind the attention and the MLP (Gemma 2 and 3) are called as ever. The second sum is left: the norm
behind it belongs to the next layer. A layer is taken over if its own forward, with stand-ins for its parts,
hands the same bits and keywords to them and gives the same bits.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.fused_norm import FusedNorm, may_be_passed, options_of
from monograph.hf.transformers.module_probe import Given, draw, probe_of, runs_here, same, tried
from monograph.ops.rms_norm import rms_norm
from monograph.upstream.instance_class import InstanceClass, put_before
from monograph.upstream.torch_names import buffers_of, parameters_of

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_BEHIND = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_COLS = 64


class FusedLayer(nn.Module):
    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module
    monograph_defaults: dict[str, Any]  # of the parameters of its own forward

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            return super().forward(hidden_states, *args, **kwargs)
        given = {**self.monograph_defaults, **kwargs}
        x = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)[0]
        norm: Any = self.post_attention_layernorm
        norms_behind = hasattr(self, "pre_feedforward_layernorm")
        if norms_behind:
            x, norm = norm(x), self.pre_feedforward_layernorm
        if runs_here("rms_norm", x, hidden_states) and may_be_passed(norm):
            y, s = rms_norm(x, norm.weight, hidden_states, **options_of(norm))
        else:
            s = hidden_states + x
            y = norm(s)
        y = self.mlp(y)
        return s + (self.post_feedforward_layernorm(y) if norms_behind else y)


def take_layer(module: Any) -> bool:
    children = {name for name, _ in module.named_children()}
    known = (
        children in (_PARTS, _PARTS | _BEHIND)
        and not isinstance(type(module), InstanceClass)
        and "forward" not in module.__dict__
        and not parameters_of(module)
        and not buffers_of(module)
        and isinstance(_norm_of(module), FusedNorm)
    )
    if not known:
        return False
    named = _named(type(module).forward)
    if named is None or not all(
        _agrees(module, named, dtype, train)
        for dtype in (torch.bfloat16, torch.float32)
        for train in (False, True)
    ):
        return False
    module.monograph_defaults = _defaults(named)
    put_before(FusedLayer, module)
    return True


def _norm_of(layer: Any) -> Any:
    name = "pre_feedforward_layernorm"
    return getattr(layer, name if hasattr(layer, name) else "post_attention_layernorm")


def _named(forward: Any) -> list[inspect.Parameter] | None:
    """Its parameters behind the first; None if there are others than names, and more by `**`."""
    _, hidden, *rest = inspect.signature(forward).parameters.values()
    named = [p for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
    simple = all(p.default is p.empty or p.default is None or isinstance(p.default, bool) for p in named)
    others = [p.kind for p in rest if p not in named]
    if hidden.name != "hidden_states" or not simple or others != [inspect.Parameter.VAR_KEYWORD]:
        return None
    return named


def _defaults(named: list[inspect.Parameter]) -> dict[str, Any]:
    return {p.name: p.default for p in named if p.default is not p.empty}


def _done(module: Any, forward: Any, given: dict[str, Any], dtype: torch.dtype, **attributes: Any) -> Any:
    """What the layer asked its parts and gave, or None if it refused."""
    parts: dict[str, Any] = {
        name: Given(draw(seed, 2, 5, _COLS).to(dtype))
        for seed, name in enumerate(sorted(name for name, _ in module.named_children()))
    }
    parts["self_attn"].answer = (parts["self_attn"].answer, None)
    norm = _norm_of(module)
    name = next(name for name, child in module.named_children() if child is norm)
    parts[name] = probe_of(norm, {"weight": (0.4 + 0.5 * draw(20, _COLS)).to(dtype)}, {})
    probe = probe_of(module, {}, parts)
    # A number of the layer's own would be a factor.
    probe.__dict__.update({name: 0.75 for name, value in module.__dict__.items() if isinstance(value, float)})
    probe.__dict__.update(attributes)
    y = tried(forward, probe, draw(21, 2, 5, _COLS).to(dtype), **given)
    return None if y is None else (y, [part.asked for part in parts.values() if isinstance(part, Given)])


def _agrees(module: Any, named: list[inspect.Parameter], dtype: torch.dtype, train: bool) -> bool:
    defaults = _defaults(named)
    drawn = {p.name: draw(30 + i, 1) for i, p in enumerate(named)}
    required = {name: value for name, value in drawn.items() if name not in defaults}
    # From transformers 5.23 on the forward of a class checkpoints, too, and takes caches away then.
    state = {"training": train, "gradient_checkpointing": False}
    for given in (required, {**drawn, "cu_seq_lens_q": draw(50, 1)}):
        want = _done(module, type(module).forward, given, dtype, **state)
        got = _done(module, FusedLayer.forward, given, dtype, **state, monograph_defaults=defaults)
        if want is None or not same(got, want):
            return False
    return True
