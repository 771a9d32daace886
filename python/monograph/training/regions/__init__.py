"""Regions: the decoder layers of a model as operators, traced once for each layer signature.

    mg.optimize(model, regions=True)     # or make_regions(model)

A step is then one outer graph with a node per layer. It compiles in seconds whatever the depth, generates no
code and has the bits of eager mode.
"""

from monograph.training.regions.find import make_regions, refusals, region_layers, undo_regions
from monograph.training.regions.outer_graph import outer_graph
from monograph.training.regions.registry import TRACES, forget

__all__ = [
    "TRACES",
    "forget",
    "make_regions",
    "outer_graph",
    "refusals",
    "region_layers",
    "undo_regions",
]
