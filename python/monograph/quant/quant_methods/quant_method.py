"""What every producer's file says: how its config is recognised, read and written, and its tensors too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.quant.packed_weight import PackedWeight
from monograph.quant.stack_pair import Stack

Config = dict[str, Any]


@dataclass(frozen=True)
class Quantization:
    """What was chosen for a model that is quantised here."""

    format: str
    dense: Sequence[str] | None  # linear layers that are not packed; None: the output head
    double_quant: bool = False
    scale_type: str | None = None
    block_size: int = 0  # where blocks are groups of a row: its size, 0 for the row
    symmetric: bool = True  # without zero points


class QuantMethod(ABC):
    """One producer's way to write packed weights into a checkpoint.

    Which layers are packed is read from the tensors, never from a config's list of exceptions: a list that
    says too much or too little cannot turn codes into weights. The config is checked before any tensor is
    read, so that a scheme with another meaning under the same names is refused.
    """

    name: str
    methods: tuple[str, ...]  # `quant_method` in a quantization_config
    saves: tuple[str, ...] = ()  # the formats that are saved by it
    parts: tuple[str, ...]  # tensors of one linear layer that belong to its weight; `weight` comes first
    linears = True  # whether linear layers may be packed; else experts alone

    def stack_parts(self, name: str) -> list[str]:
        """The same for a stack of experts in one parameter: docs/reference/formats.md#stacks-of-experts."""
        return [name + part.removeprefix("weight") for part in self.parts if part.startswith("weight")]

    @abstractmethod
    def formats(self, config: Mapping[str, Any]) -> list[str]:
        """The formats of a folder with this quantization_config; a ValueError names what cannot be taken."""

    @abstractmethod
    def pack(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Stack | None:
        """The weight of one layer from its `parts`, views without a copy; None if it is dense.

        `dtype` is what the weight dequantises to, unless the tensors say it themselves.
        """

    def check_parts(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Raises if the parts of a layer cannot be what `config` says of every layer."""

    @abstractmethod
    def unpack(self, weight: PackedWeight) -> dict[str, torch.Tensor]:
        """The `parts` of one layer, for saving."""

    def config(self, chosen: Quantization) -> Config:
        """The quantization_config to save for a format of `saves`."""
        raise NotImplementedError(f"{self.name}: nothing is quantised by this method")

    def check_saved(self, config: Mapping[str, Any]) -> None:  # noqa: B027
        """Raises if a model with this quantization_config cannot be saved with its weights alone."""

    @abstractmethod
    def saved_again(self, config: Mapping[str, Any], dense: Sequence[str]) -> Config:
        """The quantization_config of a folder that was loaded and is saved: `config` without what concerns
        activations, whose scales are not kept, and with `dense` added to the layers that are not packed."""


def listed(names: Sequence[str] | None, more: Sequence[str]) -> list[str]:
    """`names` with `more` at the end, each once."""
    return list(dict.fromkeys([*(names or ()), *more]))
