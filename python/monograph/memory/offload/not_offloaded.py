"""What stays in memory beside marked storages: those of a model, and tensors that autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from monograph.ops.offload_marks import has_storage
from monograph.upstream.torch_names import version_if_counted


class Stayed:
    """A tensor that autograd saved and that stays. Torch compares no versions behind hooks: this does."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The tensor that the hook was given has the counter of the original.
        self.tensor, self.version = tensor, version_if_counted(tensor)

    def unchanged(self) -> torch.Tensor:
        found = version_if_counted(self.tensor)
        if found != self.version:
            raise RuntimeError(
                "offload_activations: one of the variables needed for gradient computation has been modified "
                f"by an inplace operation: {self.tensor.dtype} {list(self.tensor.shape)} is at version "
                f"{found}, wanted version {self.version}, that of its saving"
            )
        return self.tensor


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))


def storages_of(model: nn.Module) -> set[int]:
    """The addresses of the storages of a model: parameters, buffers, and tensors that its modules keep."""
    found: set[int] = set()
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for name, value in vars(module).items():
            if not name.startswith("_"):
                own += _tensors_in(value)
        for tensor in own:
            if has_storage(tensor):
                found.add(tensor.untyped_storage().data_ptr())
    return found - {0}
