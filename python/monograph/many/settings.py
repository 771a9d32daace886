"""What an adapter's own modules are set to: rows that are joined are computed by other modules.

The modules of all rows are made once, from the configs of the adapters. What somebody sets later in those of
one adapter (another rate of dropout, a scaling, a hook) they would not have; it is told instead.
"""

from __future__ import annotations

from typing import Any

from torch import nn

Settings = dict[str, Any]

_PLAIN = (bool, int, float, str)
_OF_A_CALL = ("training", "max_seq_len_cached")  # what a forward itself may write
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def settings_of(model: nn.Module) -> Settings:
    """Plain values of all modules by their names, their hooks, and forwards of their own."""
    found: Settings = {}
    for path, module in model.named_modules():
        own = vars(module)
        for name, value in own.items():
            plain = isinstance(value, _PLAIN) and name not in _OF_A_CALL
            several = isinstance(value, dict) and bool(value) and not isinstance(value, nn.Module)
            if plain:
                found[f"{path}.{name}"] = value
            elif several and all(isinstance(one, _PLAIN) for one in value.values()):
                found[f"{path}.{name}"] = dict(value)
        for name in _HOOKS:
            found[f"{path}.{name}"] = len(own[name])
        found[f"{path}.forward"] = id(own.get("forward", type(module)))
    return found


def check_settings(name: str, model: nn.Module, before: Settings) -> None:
    """ValueError that names what is set in another way than when the adapter joined."""
    now = settings_of(model)
    if now == before:
        return
    key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
    found = f"{key.lstrip('.')} is {now.get(key)!r} and was {before.get(key)!r} when it joined"
    raise ValueError(
        f'adapter {name}: {found}; rows that are joined keep what was, wanted rows="apart" or a new ManyStep'
    )
