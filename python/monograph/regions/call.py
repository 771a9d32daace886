"""What a decoder layer is called with: its tensors, and everything else as one string.

The string is an argument of the region operator, so that a graph shows it and a trace is found by it:

    structure, tensors = taken_apart((hidden,), {"position_embeddings": (cos, sin), "use_cache": False})
    text = described(structure)    # "((b'*',), {'position_embeddings': (b'*', b'*'), 'use_cache': False})"
    args, kwargs = put_together(text, tensors)
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

import torch

TENSOR = b"*"  # no constant of a call is bytes
CONSTANTS = (bool, int, float, str, type(None))


def taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with TENSOR in the place of each tensor, which is appended to `tensors`. Dynamo traces it."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, (tuple, list)):
        return tuple([taken_apart(part, tensors) for part in value])
    if isinstance(value, dict):
        return {name: taken_apart(part, tensors) for name, part in value.items()}
    return value


def only_constants(structure: Any) -> bool:
    if isinstance(structure, tuple):
        return all([only_constants(part) for part in structure])
    if isinstance(structure, dict):
        return all([only_constants(part) for part in structure.values()])
    return structure == TENSOR or isinstance(structure, CONSTANTS)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def described(structure: Any) -> str:
    return repr(structure)


@functools.lru_cache(maxsize=256)
def _structure(text: str) -> Any:
    return ast.literal_eval(text)


def put_together(text: str, tensors: list[torch.Tensor]) -> Any:
    """The arguments behind a description, with these tensors."""
    rest = iter(tensors)
    made = _filled(_structure(text), rest)
    if next(rest, None) is not None:
        raise ValueError(f"region: {len(tensors)} tensors, more than {text} has places")
    return made


def _filled(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if structure == TENSOR:
        return next(tensors)
    if isinstance(structure, tuple):
        return tuple(_filled(part, tensors) for part in structure)
    if isinstance(structure, dict):
        return {name: _filled(part, tensors) for name, part in structure.items()}
    return structure
