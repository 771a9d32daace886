"""The trained parameters of each region as slices of the flat tensor of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn

from monograph.distributed.expert_adapter import wrappers_of_cut
from monograph.training.flat_parameters import FlatParameters
from monograph.training.regions.find import region_layers
from monograph.training.regions.trained import Layout

Part = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class RegionSlices:
    """One or two slices of `state.flat` per region: decayed parameters and others.

    leaves: what to differentiate by; they follow each other as in `flat`. They are the parameters themselves
    where no region has them. cut: which of them are factors of spread experts, [ranks, n]: the same slice
    once for each rank whose tokens they serve, so that each has a gradient of its own.
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
        found: dict[str, list[tuple[Part, int, int]]] = {}
        wrappers = wrappers_of_cut(model)
        self._given: list[tuple[Any, str, int, torch.Size]] = []  # factors of no region, for their wrappers
        self._ranks = ranks = 0 if state.owners is None else state.owners.size
        self.cut: list[bool] = []
        self.leaves: list[torch.Tensor] = []
        self.free: list[tuple[str, int]] = []  # parameters of no region, with their places in `leaves`
        begin = 0
        listed = zip(state.names, state.parameters, state.sizes, strict=True)
        for (path, cut), group in groupby(
            listed, key=lambda entry: (owner.get(entry[0]), entry[0] in state.cuts)
        ):
            entries = list(group)
            end = begin + sum(size for _, _, size in entries)
            if path is None and cut:
                for name, parameter, size in entries:
                    self._given.append((*wrappers[name], len(self.leaves), parameter.shape))
                    self.leaves.append(_spread(state.flat[begin : begin + size], ranks))
                    begin += size
            elif path is None:
                self.free += [(name, len(self.leaves) + n) for n, (name, _, _) in enumerate(entries)]
                self.leaves += [parameter for _, parameter, _ in entries]
            else:
                lead = (ranks,) if cut else ()
                part = tuple(
                    (name.removeprefix(f"{path}."), (*lead, *p.shape), p.dtype) for name, p, _ in entries
                )
                found.setdefault(path, []).append((part, ranks if cut else 0, len(self.leaves)))
                flat = state.flat[begin:end]
                self.leaves.append(_spread(flat, ranks) if cut else flat.detach().requires_grad_(True))
            self.cut += [cut] * (len(self.leaves) - len(self.cut))
            begin = end
        self.sizes = [
            leaf[0].numel() if cut else leaf.numel() for leaf, cut in zip(self.leaves, self.cut, strict=True)
        ]
        self._regions = list(layers.values())
        self._of_layers = [
            (
                layers[where],
                Layout(
                    tuple(part for part, _, _ in pairs),
                    sliced=True,
                    times=tuple(times for _, times, _ in pairs),
                ),
                [place for _, _, place in pairs],
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
            self.give(None)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Parts of `flat` that lie as `leaves`, by whose rows it can be differentiated too."""
        parts = zip(flat.split(self.sizes), self.cut, strict=True)
        return [part.expand(self._ranks, -1) if cut else part for part, cut in parts]

    def give(self, pieces: Sequence[torch.Tensor] | None) -> None:
        """Hands the regions their pieces, which lie as `leaves`. Dynamo traces it."""
        for layer, _, places in self._of_layers:
            layer.region_given = None if pieces is None else [pieces[place] for place in places]
        for wrapper, _, _, _ in self._given:
            wrapper.given = None if pieces is None else {}
        if pieces is not None:
            for wrapper, which, place, shape in self._given:
                wrapper.given[which] = pieces[place].view(-1, *shape)


def _spread(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """[ranks, n] of the same memory."""
    return flat.detach().expand(ranks, -1).requires_grad_(True)


def _trained(layer: nn.Module) -> set[str]:
    return {name for name, p in layer.named_parameters() if p.requires_grad}
