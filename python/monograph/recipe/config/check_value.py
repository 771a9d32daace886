"""A value from YAML against a type annotation: converted, or refused with what was found and wanted."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin


def wanted(hint: Any) -> str:
    """An annotation in the words of a person who writes YAML."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(wanted(part) for part in parts))
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin is list:
        return f"a list of {wanted(parts[0])}"
    if origin is dict:
        return "a mapping" if parts[1] is Any else f"a mapping to {wanted(parts[1])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(hint, "empty" if hint is type(None) else "anything")


def _refuse(value: Any, hint: Any, where: str) -> ValueError:
    kind = "" if value is None else f" ({type(value).__name__})"
    return ValueError(f"{where} is {value!r}{kind}, wanted {wanted(hint)}")


def _number(value: Any, hint: Any, where: str) -> int | float:
    if hint is float and isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-4, without a point, as text
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, (int, float) if hint is float else int):
        raise _refuse(value, hint, where)
    return hint(value)


def checked(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it. ValueError that names `where`, the value and what is wanted."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        for part in parts:
            try:
                return checked(value, part, where)
            except ValueError:
                continue
        raise _refuse(value, hint, where)
    if origin is Literal:
        if not any(value is part or (value == part and type(value) is type(part)) for part in parts):
            raise _refuse(value, hint, where)
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _refuse(value, hint, where)
        return [checked(entry, parts[0], f"{where}.{index}") for index, entry in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise _refuse(value, hint, where)
        return {str(name): checked(entry, parts[1], f"{where}.{name}") for name, entry in value.items()}
    if hint in (int, float):
        return _number(value, hint, where)
    if hint is not Any and not isinstance(value, hint):
        raise _refuse(value, hint, where)
    return value
