"""Whose code a file is: how far its reading and writing of globals is looked at."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from types import CodeType
from typing import Any

OURS, TRUSTED, KNOWN, FOREIGN = "ours", "trusted", "known", "foreign"
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
# They keep caches of their own and choose operators by state of theirs that no forward changes.
_TRUSTED = frozenset({"torch", "functorch", "numpy", "sympy", "networkx", "triton"})
# They read attributes by names that are not constants, of configs above all, whose other names do not matter.
_KNOWN = frozenset({"transformers", "peft", "accelerate", "trl", "einops"})
DYNAMIC = frozenset({"getattr", "setattr", "vars", "__dict__", "eval", "exec", "globals", "__getattribute__"})
_BY_STRINGS = DYNAMIC | {"hasattr", "delattr", "attrgetter", "__setattr__"}
_OUR_FOLDER = os.path.dirname(os.path.abspath(sys.modules["monograph"].__file__ or "")) + os.sep
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


@functools.lru_cache(maxsize=8192)
def of_file(path: str) -> str:
    if path.startswith(("<frozen", "<eval_with_key>")):
        return TRUSTED
    if path.startswith(_OUR_FOLDER):
        return OURS
    if installed := _INSTALLED.search(path):
        package = installed[1]
        return TRUSTED if package in _TRUSTED else KNOWN if package in _KNOWN else FOREIGN
    return TRUSTED if path.startswith(_STANDARD) else FOREIGN


def of_module(name: Any) -> str:
    """Of the module with this name; one without a file is Python's own, or was typed in."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    path = getattr(module, "__file__", None)
    if path is None:
        return TRUSTED if name in sys.builtin_module_names else FOREIGN
    return of_file(path)


def of_code(code: CodeType, space: dict[str, Any]) -> str:
    """Of a function with these globals; one that was made from a string is its module's."""
    if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen"):
        return of_module(space.get("__name__"))
    return of_file(code.co_filename)


def looked_at(whose: str) -> bool:
    return whose in (KNOWN, FOREIGN)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Global names and attributes of a function, and of functions inside it; strings, too, if it reads
    attributes by strings."""
    found = set(code.co_names)
    strings = not found.isdisjoint(_BY_STRINGS)
    waiting: list[Any] = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if strings and isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            waiting.extend(constant)
        elif isinstance(constant, CodeType):
            found |= names_in(constant)
    return frozenset(found)
