"""The parts of a training state, each made when it is asked for, and a file that is written part by part.

Of factors that are cut with their experts no rank has the whole. Written part by part, the first rank holds
one of them at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

# In the order in which safetensors writes them.
_NAMES = {torch.int64: "I64", torch.float32: "F32", torch.int32: "I32"}


@dataclass(frozen=True)
class StatePart:
    """make: the tensor, or None on a rank that does not get it; where factors are cut a collective."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    make: Callable[[], torch.Tensor | None]


def part_of(name: str, tensor: torch.Tensor) -> StatePart:
    """Of a tensor that every rank has."""
    return StatePart(name, tensor.dtype, tensor.shape, tensor.clone)


def made(parts: Iterable[StatePart]) -> dict[str, torch.Tensor]:
    """All that this rank gets, by name. A collective where a part is one."""
    found = ((part.name, part.make()) for part in parts)
    return {name: tensor for name, tensor in found if tensor is not None}


def write_parts(parts: Iterable[StatePart], path: str | None) -> None:
    """A safetensors file, with the bytes that safetensors' save_file gives. All ranks call it if a part is a
    collective; path: on the rank that gets the parts, None on others."""
    ordered = sorted(parts, key=lambda part: (list(_NAMES).index(part.dtype), part.name))
    header, end = {}, 0
    for part in ordered:
        begin, end = end, end + math.prod(part.shape) * part.dtype.itemsize
        header[part.name] = {
            "dtype": _NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with nullcontext() if path is None else open(path, "wb") as file:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for part in ordered:
            tensor = part.make()
            if file is not None:
                if tensor is None or tensor.shape != part.shape or tensor.dtype != part.dtype:
                    raise RuntimeError(f"{part.name}: this rank writes and did not get it as announced")
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor
