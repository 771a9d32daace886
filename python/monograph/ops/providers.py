"""Who computes an operator on a device: one table, chosen when first asked, shown, and yours to change.

    MONOGRAPH_PROVIDER=varlen_attention=flash-attn,rms_norm=portable python train.py

`monograph` is our kernel, `torch` and the libraries compute behind the same operator, `portable` is aten
operations. A row names them best first; taken is the first that is there: a kernel in the dispatcher, a
library that imports and whose version was tested. What a provider cannot do (a dtype, a size) it says by
name; then the next of its row computes, or, if it was asked for, the call raises.

Layers of other libraries are replaced by our operators only where somebody else than `portable` computes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from monograph.ops.has_kernel import dispatch_key, has_kernel, has_portable
from monograph.upstream.tested_versions import untried
from monograph.upstream.torch_names import all_operators, call_portable, replaced_kernel

VARIABLE = "MONOGRAPH_PROVIDER"
OURS, PORTABLE = "monograph", "portable"

Row = tuple[str, ...]
_DEFAULT: Row = (OURS, PORTABLE)
# Operator, device, who. Operators and devices that are not listed have the default; gradients have the row of
# their operator. `portable` attention is none to fall back to on CUDA: it multiplies every query with every
# key.
TABLE: dict[str, dict[str, Row]] = {
    "experts": {"cpu": (OURS, "torch", PORTABLE), "cuda": (OURS, "torch", PORTABLE)},
    "causal_conv1d": {"cpu": _DEFAULT, "cuda": (OURS, "fla", PORTABLE)},
    "gated_delta_rule": {"cpu": _DEFAULT, "cuda": (OURS, "fla", PORTABLE)},
    "varlen_attention": {"cpu": _DEFAULT, "cuda": (OURS, "torch", "flash-attn")},
}
# Whose functions are called: the module that is imported, and the distribution whose version counts.
LIBRARIES = {
    "fla": ("fla.ops.gated_delta_rule", "fla-core"),
    "flash-attn": ("flash_attn", "flash-attn"),
}
# The module of ours that calls a provider for an operator: a function of the operator's name, one for each
# gradient, and why_not(operator, *arguments), the reason why it cannot do a call.
CALLS = {
    ("causal_conv1d", "fla"): "monograph.ops.causal_conv1d_fla",
    ("experts", "torch"): "monograph.ops.experts_torch",
    ("gated_delta_rule", "fla"): "monograph.ops.gated_delta_rule_fla",
    ("varlen_attention", "flash-attn"): "monograph.ops.varlen_attention_flash_attn",
    ("varlen_attention", "torch"): "monograph.ops.varlen_attention_torch",
}
_GRADIENTS = ("_backward", "_dw")
# Operators that compute nothing on a device.
_HOST = (
    "checkpoint_",
    "limit_",
    "offload",
    "pack",
    "read_ahead_",
    "reload",
    "rotary_frequencies",
    "spill_",
    "system_",
    "wait",
)


class Choice(NamedTuple):
    """provider: who computes. others: those before it in the row, and why not. asked: somebody chose it."""

    provider: str
    others: dict[str, str]
    asked: bool


def row_name(operator: str) -> str:
    """The operator that a gradient belongs to, if that has a row; else the operator itself."""
    for ending in _GRADIENTS:
        if operator.removesuffix(ending) in TABLE:
            return operator.removesuffix(ending)
    return operator


def row(operator: str, device_type: str) -> Row:
    """Who may compute it there, best first."""
    return TABLE.get(row_name(operator), {}).get(device_type, _DEFAULT)


_asked: dict[str, str] = {}


def _why_not_asked(operator: str, provider: str) -> str | None:
    if operator not in _all_names():
        several = ", ".join(TABLE)
        return f"{operator!r} is no operator that others can compute; those with several providers: {several}"
    rows = TABLE.get(operator, {}).values() or (_DEFAULT,)
    names = sorted({PORTABLE, *(name for names in rows for name in names)})
    if provider not in names:
        return f"{operator} by {provider!r} is unknown, wanted one of {', '.join(names)}"
    return None


def check_asked(asked: Mapping[str, str]) -> list[str]:
    """What is wrong with pairs of an operator and a provider."""
    reasons = (_why_not_asked(row_name(operator), provider) for operator, provider in asked.items())
    return [reason for reason in reasons if reason is not None]


def parsed(text: str) -> dict[str, str]:
    """`operator=provider`, several with commas between. ValueError for anything else."""
    pairs = [entry.strip().partition("=") for entry in text.split(",") if entry.strip()]
    wrong = [f"{operator!r} has no provider" for operator, _, provider in pairs if not provider]
    asked = {operator.strip(): provider.strip() for operator, _, provider in pairs}
    if problems := wrong or check_asked(asked):
        raise ValueError(f"{VARIABLE} is {text!r}: {problems[0]}; written as {VARIABLE}=rms_norm=portable")
    return asked


def why_missing(provider: str, asked: bool = False) -> str | None:
    """Why a library is not there, with its name; an untested version is, for those who ask for it."""
    if provider not in LIBRARIES:
        return None
    gone, untested = _looked_up(*LIBRARIES[provider])
    return gone if asked else gone or untested


@functools.cache
def _looked_up(module: str, distribution: str) -> tuple[str | None, str | None]:
    """Why it cannot be used, and why not without being asked for."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"{distribution} is not installed", None
    try:
        importlib.import_module(module)
    except Exception as error:  # a library that was built for another torch raises what it likes
        return f"{distribution} does not import: {type(error).__name__}: {error}", None
    found = untried(distribution)
    return None, None if found is None else f"{distribution} is {found[0]}, tested is {found[1]}"


def _why_not(provider: str, operator: str, device_type: str, asked: bool) -> str | None:
    if provider == OURS:
        there = has_kernel(row_name(operator), torch.device(device_type))
        return None if there else f"no kernel for {device_type}"
    return why_missing(provider, asked)


def choose(operator: str, device_type: str) -> Choice:
    """Who computes an operator there. ValueError if it was asked for and is not there."""
    names = row(operator, device_type)
    wanted = _asked.get(row_name(operator))
    if wanted is not None and (wanted in names or wanted == PORTABLE):
        if (reason := _why_not(wanted, operator, device_type, asked=True)) is not None:
            raise ValueError(f"{row_name(operator)} by {wanted} on {device_type}: {reason}")
        return Choice(wanted, {}, asked=True)
    others: dict[str, str] = {}
    for provider in names:
        if (reason := _why_not(provider, operator, device_type, asked=False)) is None:
            return Choice(provider, others, asked=False)
        others[provider] = reason
    return Choice("", others, asked=False)  # nobody: the operator raises, with these reasons


def candidates(operator: str, device_type: str) -> Row:
    """Who could compute it there, best first: one, if it was asked for."""
    chosen = choose(operator, device_type)
    if chosen.asked:
        return (chosen.provider,)
    missing = missing_in_row(operator, device_type)
    return tuple(name for name in row(operator, device_type) if name not in missing)


def missing_in_row(operator: str, device_type: str) -> dict[str, str]:
    """Who could compute it there if it were installed, and why it is not."""
    reasons = {p: _why_not(p, operator, device_type, asked=False) for p in row(operator, device_type)}
    return {provider: reason for provider, reason in reasons.items() if reason is not None}


def _all_names() -> set[str]:
    names = (name.partition("::") for name in all_operators())
    return {name for space, _, name in names if space == "monograph" and has_portable(name)}


def operators() -> list[str]:
    """What computes something on a device, gradients under their operator's name."""
    return sorted({row_name(name) for name in _all_names() if not name.startswith(_HOST)})


def choices(device_type: str) -> dict[str, Choice]:
    """Who computes each operator on a device."""
    return {operator: choose(operator, device_type) for operator in operators()}


def _calls(operator: str, provider: str) -> Any:
    return importlib.import_module(CALLS[row_name(operator), provider])


def notes(device: torch.device) -> list[str]:
    """What those who compute there say of the card."""
    found = []
    for operator, choice in choices(device.type).items():
        if (operator, choice.provider) in CALLS:
            say = getattr(_calls(operator, choice.provider), "note", None)
            if say is not None and (words := say(device)):
                found.append(f"{operator} by {choice.provider}: {words}")
    return found


def summary(device_type: str) -> str:
    """One line: the operators of each provider, those of most left out."""
    found: dict[str, list[str]] = {}
    for operator, choice in choices(device_type).items():
        found.setdefault(choice.provider or "nobody", []).append(operator)
    most = max(found, key=lambda provider: len(found[provider]))
    parts = [f"{p}: {', '.join(names)}" for p, names in sorted(found.items()) if p != most]
    return "; ".join([*parts, f"{most}: all others"])


_said: set[tuple[str, str, str]] = set()


def _say(operator: str, device: torch.device, reasons: list[str]) -> None:
    words = "; ".join(reasons)
    if (said := (operator, device.type, words)) not in _said:
        _said.add(said)
        text = f"monograph: {operator} on {device.type} by the portable implementation, slowly: {words}"
        warnings.warn(text, stacklevel=4)


def serve(operator: str, portable: Callable[..., Any], otherwise: str = "") -> Callable[..., Any]:
    """What is registered for devices without a kernel of ours: the best provider that can do the call.

    Its first argument is a tensor of the device. On a device with a kernel it is called by those who want the
    portable implementation. otherwise: what to do where a row has no portable one and nobody can.
    """

    @functools.wraps(portable)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return portable(first, *rest)
        where = first.device.type
        reasons = []
        for provider in candidates(operator, where):
            if provider in (OURS, PORTABLE):
                break
            calls = _calls(operator, provider)
            reason = calls.why_not(operator, first, *rest)
            if reason is None:
                return getattr(calls, operator)(first, *rest)
            reasons.append(f"{provider}: {reason}")
        else:  # nobody, and no portable one to fall back to
            reasons += [reason for reason in missing_in_row(operator, where).values()]
            instead = f"{VARIABLE}={row_name(operator)}={PORTABLE} computes it slowly"
            words = "; ".join([*reasons, *([otherwise] if otherwise else []), instead])
            raise ValueError(f"{operator} on {first.device}: {words}")
        if reasons:
            _say(operator, first.device, reasons)
        return portable(first, *rest)

    return call


_undo: list[Callable[[], None]] = []


def _ask(asked: Mapping[str, str]) -> None:
    """Replaces kernels of ours where another provider is asked for; a second call begins anew."""
    while _undo:
        _undo.pop()()
    _asked.clear()
    _asked.update({row_name(operator): provider for operator, provider in asked.items()})
    names = _all_names()
    for operator, provider in _asked.items():
        for device_type in ("cpu", "cuda"):
            if provider != OURS and provider in (PORTABLE, *row(operator, device_type)):
                for name in names & {operator + ending for ending in ("", *_GRADIENTS)}:
                    if has_kernel(name, torch.device(device_type)):
                        operation = getattr(torch.ops.monograph, name).default
                        instead = functools.partial(call_portable, operation)  # which asks the table
                        _undo.append(replaced_kernel(operation, dispatch_key(device_type), instead))


@contextmanager
def using(asked: Mapping[str, str] | None) -> Iterator[None]:
    """Inside, these pairs of operator and provider hold beside those of the environment, and win.

    ValueError for an unknown name.
    """
    if not asked:
        yield
        return
    if problems := check_asked(asked):
        raise ValueError(problems[0])
    before = dict(_asked)
    _ask({**before, **{row_name(operator): provider for operator, provider in asked.items()}})
    try:
        yield
    finally:
        _ask(before)


def _computed_there(operators: tuple[str, ...], device_type: str) -> bool:
    found = [choose(operator, device_type) for operator in operators]
    return all(choice.asked or choice.provider not in (PORTABLE, "") for choice in found)


def may_take_over(device_type: str, *operators: str) -> bool:
    """Whether our operators may stand in the place of another library's code on such a device: somebody
    computes all of them there, or `portable` was asked for. The portable form would replace what that library
    chose for the device. On meta nothing is computed, and a model there is one that will lie elsewhere."""
    return device_type == "meta" or bool(_computed_there(operators, device_type))


def load() -> None:
    """Called behind the last operator: reads the environment."""
    if text := os.environ.get(VARIABLE, ""):
        _ask(parsed(text))


def install() -> None:
    """Called when torch._dynamo is imported, which takes longer than all of ours: a graph decides once who
    computes."""
    from monograph.ops import attention_choice

    torch.compiler.assume_constant_result(_computed_there)
    torch.compiler.assume_constant_result(attention_choice.facts)
