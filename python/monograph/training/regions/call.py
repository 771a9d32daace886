"""What a decoder layer is called with: its tensors, and everything else as one string.

The string is an argument of the region operator, so that a graph shows it and a trace is found by it:

    tensors = []
    structure = taken_apart(((hidden,), {"position_embeddings": (cos, sin), "use_cache": False}), tensors)
    text = described(structure)    # "((b'*',), {'position_embeddings': (b'*', b'*'), 'use_cache': False})"
    args, kwargs = put_together(text, tensors)

An input beside the hidden states that is differentiated too, as the keys of another layer, is b'+'.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

import torch

TENSOR, DIFFERENTIATED = b"*", b"+"  # no constant of a call is bytes
_TENSORS = (TENSOR, DIFFERENTIATED)
CONSTANTS = (bool, int, float, str, type(None))


def taken_apart(value: Any, tensors: list[torch.Tensor], grad: bool = False) -> Any:
    """`value` with a mark in the place of each tensor, which is appended to `tensors`. grad: those behind the
    first that require gradients are differentiated. Dynamo traces it."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return DIFFERENTIATED if grad and len(tensors) > 1 and value.requires_grad else TENSOR
    if isinstance(value, (tuple, list)):
        return tuple([taken_apart(part, tensors, grad) for part in value])
    if isinstance(value, dict):
        return {name: taken_apart(part, tensors, grad) for name, part in value.items()}
    return value


def only_constants(structure: Any) -> bool:
    if isinstance(structure, tuple):
        return all([only_constants(part) for part in structure])
    if isinstance(structure, dict):
        return all([only_constants(part) for part in structure.values()])
    return structure in _TENSORS or isinstance(structure, CONSTANTS)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def described(structure: Any) -> str:
    return repr(structure)


@functools.lru_cache(maxsize=256)
def _structure(text: str) -> Any:
    return ast.literal_eval(text)


@functools.lru_cache(maxsize=256)
def differentiated(text: str) -> tuple[int, ...]:
    """Which tensors of a call, the hidden states not counted, are differentiated."""
    return tuple(place for place, mark in enumerate(_marks(_structure(text)), -1) if mark == DIFFERENTIATED)


def _marks(structure: Any) -> Iterator[bytes]:
    if structure in _TENSORS:
        yield structure
    elif isinstance(structure, (tuple, dict)):
        for part in structure.values() if isinstance(structure, dict) else structure:
            yield from _marks(part)


def put_together(text: str, tensors: list[torch.Tensor]) -> Any:
    """The arguments behind a description, with these tensors."""
    rest = iter(tensors)
    made = _filled(_structure(text), rest)
    if next(rest, None) is not None:
        raise ValueError(f"region: {len(tensors)} tensors, more than {text} has places")
    return made


def _filled(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if structure in _TENSORS:
        return next(tensors)
    if isinstance(structure, tuple):
        return tuple(_filled(part, tensors) for part in structure)
    if isinstance(structure, dict):
        return {name: _filled(part, tensors) for name, part in structure.items()}
    return structure
