"""Attentions of a transformers model on rotary: positions of queries and keys, with the norms of their heads.

transformers turns queries and keys by a function of the model's file, inside the attention's forward. Ours
stands in the place of that forward, for an attention whose own does the same but for that function: both run
on drawn numbers, with a cache and without, and must hand the same bits and keywords to cache, attention
function and output projection.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.fused_norm import FusedNorm, may_be_passed, options_of
from monograph.hf.transformers.module_probe import (
    Given,
    draw,
    lies_where,
    probe_of,
    runs_here,
    same,
    tried,
)
from monograph.ops.rotary import rotary
from monograph.upstream.instance_class import InstanceClass, put_before
from monograph.upstream.torch_names import buffers_of, parameters_of
from monograph.upstream.transformers_names import (
    ATTENTION_FUNCTIONS,
    ATTENTION_GLOBALS,
    attn_implementation_of,
)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
# What the forward reads itself; everything else goes to the attention function.
_READ = ("position_embeddings", "attention_mask", "past_key_values")
# Keywords of attention functions, and the attribute of the module or its config that they are.
_SOURCES = {"sliding_window": "sliding_window", "softcap": "attn_logit_softcapping"}
_BATCH, _TOKENS = 2, 5

Option = tuple[str, bool]  # of _SOURCES; whether the config has it


class FusedAttention(nn.Module):
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    config: Any
    head_dim: int
    layer_idx: int
    scaling: float
    attention_dropout: float
    monograph_options: tuple[Option, ...]
    # Of the file that the class is in:
    monograph_functions: Any
    monograph_eager: Any
    monograph_rotary: Any

    def __init_subclass__(cls) -> None:
        if cls.__bases__[0] is not FusedAttention:
            return
        own: Any = cls.__bases__[1]
        names = own.forward.__globals__
        functions, eager, turn = (names[name] for name in ATTENTION_GLOBALS)
        cls.monograph_functions = functions
        cls.monograph_eager, cls.monograph_rotary = staticmethod(eager), staticmethod(turn)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("position_embeddings") is None:
            return super().forward(hidden_states, *args, **kwargs)
        shape = hidden_states.shape[:-1]
        q, k, v = (
            project(hidden_states).view(*shape, -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _apply_rotary(self, q, k, *kwargs["position_embeddings"])
        v = v.transpose(1, 2)
        cache = kwargs.get("past_key_values")
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = self.monograph_functions.get_interface(
            attn_implementation_of(self.config), self.monograph_eager
        )
        options = {
            keyword: getattr(self.config if of_config else self, _SOURCES[keyword])
            for keyword, of_config in self.monograph_options
        }
        y, weights = attend(
            self,
            q,
            k,
            v,
            kwargs.get("attention_mask"),
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **options,
            **{name: value for name, value in kwargs.items() if name not in _READ},
        )
        return self.o_proj(y.reshape(*shape, -1).contiguous()), weights


def _apply_rotary(
    attention: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, tokens, size] of [batch, tokens, heads, size]."""
    weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    options: dict[str, Any] = {}
    if hasattr(attention, "q_norm"):
        if _norms_fit(attention.q_norm, attention.k_norm, q.dtype):
            weights = attention.q_norm.weight, attention.k_norm.weight
            options = options_of(attention.q_norm)
        else:
            q, k = attention.q_norm(q), attention.k_norm(k)
    if runs_here("rotary", q, k, cos, sin) and not cos.requires_grad:
        q, k = rotary(q, k, cos, sin, *weights, **options)
        return q.transpose(1, 2), k.transpose(1, 2)
    if options:
        q, k = attention.q_norm(q), attention.k_norm(k)
    return attention.monograph_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)


def _norms_fit(q_norm: Any, k_norm: Any, dtype: torch.dtype) -> bool:
    if not may_be_passed(q_norm) or not may_be_passed(k_norm) or options_of(q_norm) != options_of(k_norm):
        return False
    return q_norm.weight.dtype == dtype and k_norm.weight.dtype == dtype


def take_attention(module: Any) -> bool:
    forward: Any = type(module).forward
    children = {name for name, _ in module.named_children()}
    config = getattr(module, "config", None)
    known = (
        children in ({*_PROJECTIONS}, {*_PROJECTIONS, *_NORMS})
        and not isinstance(type(module), InstanceClass)
        and "forward" not in module.__dict__
        and not parameters_of(module)
        and not buffers_of(module)
        and lies_where("rotary", module)
        and isinstance(forward, FunctionType)
        and set(ATTENTION_GLOBALS) <= set(forward.__code__.co_names)
        and set(ATTENTION_GLOBALS) <= forward.__globals__.keys()
        and all(hasattr(module, name) for name in ("head_dim", "layer_idx", "scaling", "attention_dropout"))
        and all(isinstance(getattr(config, name, None), int) for name in _HEADS)
    )
    if not known:
        return False
    options = _options(module)
    if options is None or not all(
        _agrees(module, options, dtype, train, cached, marked)
        for dtype in (torch.bfloat16, torch.float32)
        for train, cached, marked in ((False, False, False), (True, False, True), (False, True, True))
    ):
        return False
    module.monograph_options = options
    put_before(FusedAttention, module)
    return True


_HEADS = ("num_attention_heads", "num_key_value_heads")


class _Marked:
    """A config with other values where it has one, to be found again."""

    def __init__(self, config: Any, marks: dict[str, Any]) -> None:
        self._config, self._marks = config, {k: v for k, v in marks.items() if hasattr(config, k)}

    def __getattr__(self, name: str) -> Any:
        return self._marks[name] if name in self._marks else getattr(self._config, name)


class _Recorder:
    """In the place of the attention functions, and of a cache: what they are given."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, []  # type: ignore[var-annotated]

    def get_interface(self, name: str, eager: Any) -> Any:
        self.calls.append((name, eager))
        return self.attend

    def attend(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.answer

    def update(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.answer


_OF_MODULE = {"attention_dropout": 0.25, "scaling": 0.3, "sliding_window": 7, "attn_logit_softcapping": 11.5}
_OF_CONFIG = {"sliding_window": 9, "attn_logit_softcapping": 13.5}


class _Trial:
    """One call of a forward on drawn numbers, and what it did."""

    def __init__(self, module: Any, dtype: torch.dtype, train: bool, cached: bool, marked: bool) -> None:
        heads, keys = (getattr(module.config, name) for name in _HEADS)
        size, batch = module.head_dim, (_BATCH, _TOKENS)
        widths = (heads, keys, keys, heads)
        self.parts: dict[str, Any] = {
            name: Given(draw(seed, *batch, width * size).to(dtype))
            for seed, (name, width) in enumerate(zip(_PROJECTIONS, widths, strict=True))
        }
        for seed, name in enumerate(_NORMS):
            norm: Any = getattr(module, name, None)
            if isinstance(norm, FusedNorm):
                weight = (0.4 + 0.5 * draw(20 + seed, norm.weight.numel())).to(dtype)
                norm = probe_of(norm, {"weight": weight}, {})
            if norm is not None:
                self.parts[name] = norm
        self.probe = probe_of(module, {}, self.parts)
        self.probe.training = train
        if marked:
            # A number that is not known would be a factor.
            marks = {k: _OF_MODULE.get(k, 0.75) for k, v in module.__dict__.items() if isinstance(v, float)}
            marks |= {k: v for k, v in _OF_MODULE.items() if k in module.__dict__}
            self.probe.__dict__.update(marks)
        self.probe.config = _Marked(module.config, _OF_CONFIG if marked else {})
        self.functions = _Recorder((draw(30, *batch, heads, size).to(dtype), draw(31, 2)))
        self.cache = _Recorder(tuple(draw(32 + i, _BATCH, keys, 9, size).to(dtype) for i in (0, 1)))
        rotated = _rotated(module.config, size)
        self.given = {
            "hidden_states": draw(4, *batch, 8).to(dtype),
            "position_embeddings": tuple(draw(5 + i, *batch, rotated).to(dtype) for i in (0, 1)),
            "attention_mask": draw(7, 1),
            "past_key_values": self.cache if cached else None,
            "position_ids": draw(8, 1),
            "use_cache": cached,
            "cu_seq_lens_q": draw(9, 1),
        }

    def done(self, forward: Any) -> Any:
        """Everything that left the forward, or None if it refused."""
        result = tried(forward, self.probe, **self.given)
        asked = [part.asked for part in self.parts.values() if isinstance(part, Given)]
        return None if result is None else (result, asked, self.functions.calls, self.cache.calls)


def _rotated(config: Any, size: int) -> int:
    """How many columns cos has."""
    parameters = getattr(config, "rope_parameters", None)
    share = parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0
    return int(size * share) if isinstance(share, float) else size


def _their_forward(forward: Any, functions: _Recorder) -> Any:
    """The forward as it is, but for the attention functions that it finds."""
    names = forward.__globals__ | {ATTENTION_FUNCTIONS: functions}
    other = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    other.__kwdefaults__ = forward.__kwdefaults__
    return other


def _options(module: Any) -> tuple[Option, ...] | None:
    """Where the forward takes what it hands to the attention function; None if that is not known."""
    trial = _Trial(module, torch.float32, True, False, True)
    done = trial.done(_their_forward(type(module).forward, trial.functions))
    if done is None or len(trial.functions.calls) != 2:
        return None
    _, keywords = trial.functions.calls[1]
    found: list[Option] = []
    for name in keywords.keys() - trial.given.keys() - {"dropout", "scaling"}:
        marks = [values.get(_SOURCES.get(name, "")) for values in (_OF_MODULE, _OF_CONFIG)]
        if keywords[name] is None or keywords[name] not in marks:
            return None
        found.append((name, keywords[name] == marks[1]))
    return tuple(sorted(found))


def _agrees(
    module: Any, options: tuple[Option, ...], dtype: torch.dtype, train: bool, cached: bool, marked: bool
) -> bool:
    trials = [_Trial(module, dtype, train, cached, marked) for _ in range(2)]
    theirs, ours = trials
    want = theirs.done(_their_forward(type(module).forward, theirs.functions))
    ours.probe.monograph_options, ours.probe.monograph_functions = options, ours.functions
    names = type(module).forward.__globals__
    _, ours.probe.monograph_eager, ours.probe.monograph_rotary = (names[name] for name in ATTENTION_GLOBALS)
    got = ours.done(FusedAttention.forward)
    return want is not None and same(got, want)
