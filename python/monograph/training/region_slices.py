"""The trained parameters of each region as slices of the flat tensor of all."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import nn

from monograph.regions.find import region_layers
from monograph.regions.trained import Layout
from monograph.training.flat_parameters import FlatParameters


def give_slices(model: nn.Module, state: FlatParameters) -> list[torch.Tensor]:
    """The regions of the model compute with slices of `state.flat` from now on, one or two a layer: decayed
    parameters and others. Gives the leaves to differentiate by: they follow each other as in `flat`."""
    layers = region_layers(model)
    owner: dict[str, str] = {}
    known = set(state.names)
    for where, layer in layers.items():
        names = [name for name, p in layer.named_parameters() if p.requires_grad]
        # A parameter that lies elsewhere too has a name there; such a layer gets its parameters one by one.
        if all(f"{where}.{name}" in known for name in names):
            owner |= {f"{where}.{name}": where for name in names}
    slices: dict[str, list[tuple[tuple[tuple[str, tuple[int, ...], torch.dtype], ...], torch.Tensor]]] = {}
    leaves: list[torch.Tensor] = []
    begin = 0
    listed = zip(state.names, state.parameters, state.sizes, strict=True)
    for path, group in groupby(listed, key=lambda entry: owner.get(entry[0])):
        entries = list(group)
        if path is None:
            leaves += [parameter for _, parameter, _ in entries]
            begin += sum(size for _, _, size in entries)
            continue
        end = begin + sum(size for _, _, size in entries)
        leaf = state.flat[begin:end].detach().requires_grad_(True)
        part = tuple((name.removeprefix(f"{path}."), tuple(p.shape), p.dtype) for name, p, _ in entries)
        slices.setdefault(path, []).append((part, leaf))
        leaves.append(leaf)
        begin = end
    for where, found in slices.items():
        parts, tensors = zip(*found, strict=True)
        layers[where].region_slices = (Layout(parts, sliced=True), list(tensors))
    return leaves


def take_slices_back(model: nn.Module) -> None:
    for layer in region_layers(model).values():
        layer.region_slices = None
