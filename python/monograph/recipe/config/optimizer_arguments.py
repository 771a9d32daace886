"""`optim_args` of Monograph's own AdamW: betas and eps, which adam_beta1, adam_beta2, adam_epsilon are."""

from __future__ import annotations

from typing import Any

import yaml

from monograph.recipe.config.check_value import checked

_ALLOWED = ("betas", "eps")
_KEYS = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",)}


def _entries(written: str | dict[str, Any]) -> dict[str, Any]:
    """A mapping, or transformers' text `eps=1e-10,betas=[0.9,0.95]`."""
    if isinstance(written, dict):
        return written
    entries: dict[str, Any] = {}
    rest = written.replace(" ", "")
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals:
            raise ValueError(f"optim_args is {written!r}, wanted a mapping, or name=value,name=value")
        closing = {"[": "]", "(": ")"}.get(rest[:1])
        end = rest.find(closing) + 1 if closing else rest.find(",")
        value, rest = (rest, "") if end <= 0 else (rest[:end], rest[end:].lstrip(","))
        entries[name] = yaml.safe_load(value.replace("(", "[").replace(")", "]"))
    return entries


def take_optim_args(values: dict[str, Any], errors: list[str]) -> None:
    """Moves what optim_args says to the keys of AdamW's numbers, in place."""
    written = values.pop("optim_args", None)
    if not written:
        return
    try:
        entries = _entries(written)
    except ValueError as error:
        errors.append(str(error))
        return
    for name, value in entries.items():
        if name not in _ALLOWED:
            errors.append(
                f"optim_args.{name}: the AdamW of the graph has {' and '.join(_ALLOWED)} alone; leave it "
                "out, or write trainer: trl beside it"
            )
            continue
        keys = _KEYS[name]
        try:
            numbers = (
                checked(value, list[float], f"optim_args.{name}")
                if name == "betas"
                else [checked(value, float, f"optim_args.{name}")]
            )
        except ValueError as error:
            errors.append(str(error))
            continue
        if len(numbers) != len(keys):
            errors.append(f"optim_args.{name} is {value!r}, wanted {len(keys)} numbers")
            continue
        for key, number in zip(keys, numbers, strict=True):
            if key in values:
                errors.append(f"{key} and optim_args.{name} say the same thing in two ways; leave one out")
            values[key] = number
