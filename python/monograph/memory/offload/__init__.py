"""Offload: tensors leave memory for a disk or the host as whole storages, once, and come back bit by bit.

    with mg.offload_activations(model, to="disk"):       # what autograd keeps
        ...
    moved = mg.offload.StorageOffloader("disk").offload(layer)   # tensors that a program keeps
    moved.reload()
    handle = mg.ops.offload.offload(x)                   # nodes of a graph

docs/explain/offload.md says which to use.
"""

from monograph.memory.offload import device_copies
from monograph.memory.offload.activations import offload_activations
from monograph.memory.offload.offloader import LeakedView, StorageOffloader
from monograph.memory.offload.spill import Counts, Spill
from monograph.ops.offload_marks import mark_not_offload

__all__ = [
    "Counts",
    "LeakedView",
    "Spill",
    "StorageOffloader",
    "device_copies",
    "mark_not_offload",
    "offload_activations",
]
