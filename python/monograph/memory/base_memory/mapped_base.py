"""Where the tensors of a model lie in files, in the order in which a forward pass uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from monograph.memory.mapped_memory import MappedMemory
from monograph.nn.packed_embedding import PackedEmbedding
from monograph.nn.repeated_layers import repeated_layers

SMALL = 1 << 20  # bytes: such tensors may be copies, and are read with what lies beside them
_GAP = 1 << 16  # bytes between two tensors that are read as one


class Reading(IntEnum):
    """As the C++ side numbers them (core/monograph/read_ahead/schedule.h)."""

    WHOLE = 0
    SCATTERED = 1
    ROUTED = 2


@dataclass(frozen=True)
class MappedTensor:
    """`nbytes` at an address, which are those of a file from `offset` on."""

    name: str
    address: int
    nbytes: int
    unit: int
    file: int
    offset: int
    reading: Reading

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _units(model: torch.nn.Module) -> tuple[dict[str, int], int]:
    """The unit of each tensor by name, and their number: a unit for each layer that repeats, one for all
    that comes behind them. What comes before belongs to the first layer."""
    layers = {path: place for place, path in enumerate(repeated_layers(model))}
    units: dict[str, int] = {}
    behind: list[str] = []
    for name, _ in _named_tensors(model):
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        layer = next((layers[path] for path in paths if path in layers), None)
        if layer is not None:
            units[name] = layer
        elif units:
            behind.append(name)
        else:
            units[name] = 0
    last = max(units.values(), default=-1) + 1
    return units | dict.fromkeys(behind, last), last + (1 if behind else 0)


def _table_of_tokens(model: Any) -> tuple[set[str], bool]:
    """The names of the table of tokens, and whether it is the head too."""
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "get_output_embeddings"):
        return set(), False
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = "values" if isinstance(table, PackedEmbedding) else "weight"
    names = {f"{path}.{own}" for path, module in model.named_modules() if module is table}
    weights = [getattr(layer, own, None) for layer in (table, head)]
    tied = all(weight is not None for weight in weights) and weights[0] is weights[1]
    return names, tied


def _readings(model: torch.nn.Module, table: set[str], tied: bool) -> dict[str, Reading]:
    """The table of tokens is used by rows, unless it is the head too; experts are used when routed to."""
    from monograph.nn import PackedExperts

    readings = {} if tied else dict.fromkeys(table, Reading.SCATTERED)
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts):
            readings.update((f"{path}.{name}", Reading.ROUTED) for name, _ in module.named_parameters())
    return readings


def _parts(tensor: torch.Tensor, reading: Reading) -> list[torch.Tensor]:
    """The experts of a stack, which operators name one by one."""
    if reading is not Reading.ROUTED or tensor.dim() < 2 or not tensor.is_contiguous():
        return [tensor]
    return list(tensor.detach().unbind(0))


def mapped_tensors(model: torch.nn.Module, memory: MappedMemory) -> list[MappedTensor]:
    """What of the model is mapped, by unit. ValueError if a tensor of a MiB or more is not."""
    units, count = _units(model)
    table, tied = _table_of_tokens(model)
    if tied:
        units |= dict.fromkeys(table, count - 1)
    readings = _readings(model, table, tied)
    found: list[MappedTensor] = []
    for name, tensor in _named_tensors(model):
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            continue
        whole = memory.extents(tensor.data_ptr(), tensor.nbytes) if tensor.is_contiguous() else None
        if whole is None or len(whole) != 1:
            if tensor.nbytes >= SMALL:
                raise ValueError(
                    f"base_memory: {name} ({tensor.nbytes} bytes) is not mapped from a file that is there: "
                    "it was cast or quantised while it loaded, or its file was deleted; wanted a folder that "
                    "`monograph quantize` or bitsandbytes wrote, in the dtype that is asked for"
                )
            continue
        reading = readings.get(name, Reading.WHOLE)
        for part in _parts(tensor, reading):
            at = part.data_ptr()
            offset = whole[0].offset + at - tensor.data_ptr()
            found.append(MappedTensor(name, at, part.nbytes, units[name], whole[0].file, offset, reading))
    return _joined(found)


def _joined(tensors: list[MappedTensor]) -> list[MappedTensor]:
    """Small tensors with the neighbours in their file, so that a scale is no read of its own; then by unit,
    in the order of the model."""
    order = {(tensor.address, tensor.nbytes): place for place, tensor in reversed(list(enumerate(tensors)))}
    joined: list[tuple[int, MappedTensor]] = []
    for (address, nbytes), place in sorted(order.items()):
        tensor = tensors[place]
        if joined:
            at, before = joined[-1]
            alike = (before.unit, before.file, before.reading) == (tensor.unit, tensor.file, tensor.reading)
            near = before.end <= address <= before.end + _GAP
            inside = before.address <= address and address + nbytes <= before.end
            if alike and inside:
                continue
            if alike and near and min(before.nbytes, nbytes) < SMALL and tensor.reading is Reading.WHOLE:
                joined[-1] = (min(at, place), replace(before, nbytes=tensor.end - before.address))
                continue
        joined.append((place, tensor))
    return [tensor for _, tensor in sorted(joined, key=lambda entry: (entry[1].unit, entry[0]))]
