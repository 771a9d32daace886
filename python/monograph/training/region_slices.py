"""The trained parameters of each region as slices of the flat tensor of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import nn

from monograph.regions.find import region_layers
from monograph.regions.trained import Layout
from monograph.training.flat_parameters import FlatParameters

Part = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class RegionSlices:
    """One or two slices of `state.flat` per region: decayed parameters and others.

    leaves: what to differentiate by; they follow each other as in `flat`. They are the parameters themselves
    where no region has them.
    """

    def __init__(self, model: nn.Module, state: FlatParameters) -> None:
        layers = region_layers(model)
        owner: dict[str, str] = {}
        known = set(state.names)
        for where, layer in layers.items():
            names = [f"{where}.{name}" for name, p in layer.named_parameters() if p.requires_grad]
            # A parameter that lies elsewhere too has its name there; such a layer gets its own one by one.
            if known.issuperset(names):
                owner |= dict.fromkeys(names, where)
        found: dict[str, list[tuple[Part, torch.Tensor]]] = {}
        self.leaves: list[torch.Tensor] = []
        begin = 0
        listed = zip(state.names, state.parameters, state.sizes, strict=True)
        for path, group in groupby(listed, key=lambda entry: owner.get(entry[0])):
            entries = list(group)
            end = begin + sum(size for _, _, size in entries)
            if path is None:
                self.leaves += [parameter for _, parameter, _ in entries]
            else:
                leaf = state.flat[begin:end].detach().requires_grad_(True)
                part = tuple(
                    (name.removeprefix(f"{path}."), tuple(p.shape), p.dtype) for name, p, _ in entries
                )
                found.setdefault(path, []).append((part, leaf))
                self.leaves.append(leaf)
            begin = end
        self._of_layers = [
            (
                layers[where],
                Layout(tuple(part for part, _ in pairs), sliced=True),
                [leaf for _, leaf in pairs],
            )
            for where, pairs in found.items()
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, regions compute with the slices; outside, with the parameters, as others expect."""
        for layer, layout, leaves in self._of_layers:
            layer.region_slices = (layout, leaves)
        try:
            yield
        finally:
            for layer, _, _ in self._of_layers:
                layer.region_slices = None
