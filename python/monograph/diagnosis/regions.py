"""What `doctor` says about layers that are operators: their graphs, and what lies inside them."""

from __future__ import annotations

from operator import getitem

import torch
from torch import nn

from monograph.diagnosis.report import Cause, Report
from monograph.training.regions import TRACES, forget, region_layers


def begin(model: nn.Module) -> None:
    """The traces of the model are counted from here."""
    if region_layers(model):
        forget()


def look_inside(model: nn.Module, report: Report, shapes: dict[tuple[int, ...], str]) -> None:
    """Counts the inner graphs; `shapes` are those of packed weights, by name of a layer.

    A float tensor of such a shape that a node makes from nothing is a copy of the weight. What regions keep
    for their backward is in the outer graph, and counted there.
    """
    layers = region_layers(model)
    report.regions = len(layers)
    if not layers:
        return
    report.region_kinds, report.inner_graphs = TRACES.signatures, TRACES.graphs
    first = next(iter(layers))
    for found in TRACES.by_signature.values():
        for again in found[1:]:
            reason = f"trace {again.number}: lengths without the relations of trace {found[0].number}"
            report.recompiles.append(Cause(reason, f"region {first} and its kind"))
    for traced in TRACES.by_number.values():
        for graph in (traced.forward, traced.backward):
            for node in graph.graph.nodes if graph is not None else ():
                value = node.meta.get("val")
                if node.op == "placeholder" or node.target is getitem or not isinstance(value, torch.Tensor):
                    continue
                shape = tuple(n for n in value.shape if isinstance(n, int))
                whole = len(shape) == value.dim() and value.is_floating_point()
                if whole and shape in shapes:
                    text = f"{node.name} {shape} {value.dtype} in a region: the size of {shapes[shape]}"
                    report.weight_copies.append(text)
