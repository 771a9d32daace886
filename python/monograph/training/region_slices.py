"""The trained parameters of each region as slices of the flat tensor of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import nn

from monograph.training.flat_parameters import FlatParameters
from monograph.training.regions.find import region_layers
from monograph.training.regions.trained import Layout

Part = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class RegionSlices:
    """One or two slices of `state.flat` per region: decayed parameters and others.

    leaves: what to differentiate by; they follow each other as in `flat`. They are the parameters themselves
    where no region has them.
    """

    def __init__(self, model: nn.Module, state: FlatParameters) -> None:
        layers = region_layers(model)
        owner: dict[str, str] = {}
        known = set(state.names) - state.shared_names
        self.shared: list[str] = []  # regions with a trained parameter that lies elsewhere too
        for where, layer in layers.items():
            names = [f"{where}.{name}" for name in _trained(layer)]
            # Such a layer gets its own one by one: all places of a parameter are one leaf.
            if known.issuperset(names):
                owner |= dict.fromkeys(names, where)
            else:
                self.shared.append(where)
        found: dict[str, list[tuple[Part, int]]] = {}
        self.leaves: list[torch.Tensor] = []
        self.free: list[tuple[str, int]] = []  # parameters of no region, with their places in `leaves`
        begin = 0
        listed = zip(state.names, state.parameters, state.sizes, strict=True)
        for path, group in groupby(listed, key=lambda entry: owner.get(entry[0])):
            entries = list(group)
            end = begin + sum(size for _, _, size in entries)
            if path is None:
                self.free += [(name, len(self.leaves) + n) for n, (name, _, _) in enumerate(entries)]
                self.leaves += [parameter for _, parameter, _ in entries]
            else:
                part = tuple(
                    (name.removeprefix(f"{path}."), tuple(p.shape), p.dtype) for name, p, _ in entries
                )
                found.setdefault(path, []).append((part, len(self.leaves)))
                self.leaves.append(state.flat[begin:end].detach().requires_grad_(True))
            begin = end
        self.sizes = [leaf.numel() for leaf in self.leaves]
        self._regions = list(layers.values())
        self._of_layers = [
            (
                layers[where],
                Layout(tuple(part for part, _ in pairs), sliced=True),
                [place for _, place in pairs],
            )
            for where, pairs in found.items()
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, regions compute with the slices; outside, with the parameters, as others expect."""
        for layer, layout, _ in self._of_layers:
            if layout.names != (trained := _trained(layer)):
                changed = sorted(layout.names ^ trained)
                raise RuntimeError(
                    f"region {layer.region_name}: the trained parameters are not those that the step was "
                    f"made for, {changed[:3]} changed; wanted a new TrainStep"
                )
        try:
            for layer, layout, _ in self._of_layers:
                layer.region_layout = layout
            self.give(self.leaves)
            yield
        finally:
            for layer in self._regions:
                layer.region_layout = layer.region_given = None

    def give(self, pieces: Sequence[torch.Tensor] | None) -> None:
        """Hands the regions their pieces, which lie as `leaves`. Dynamo traces it."""
        for layer, _, places in self._of_layers:
            layer.region_given = None if pieces is None else [pieces[place] for place in places]


def _trained(layer: nn.Module) -> set[str]:
    return {name for name, p in layer.named_parameters() if p.requires_grad}
