"""Lets Inductor keep an operator of ours on one device and decompose it on another.

It refuses to keep an operator that has an entry in its table of decompositions ("both a fallback and a
decomp"), though the entry gives NotImplemented for tensors of a device that has a kernel: a graph for the CPU
on a machine with an accelerator. With a fallback registered beforehand, by the rules Inductor has for
operators it does not know, the entry decides for each call.
"""

from __future__ import annotations

import torch

from monograph.ops.inductor_decompositions import decomposed_names
from monograph.upstream.torch_names import (
    layout_constraint_tag,
    make_fallback,
    tag_to_layout_constraint,
)


def install() -> None:
    """Called when Inductor's lowerings are there."""
    for name in decomposed_names():
        operator = getattr(torch.ops.monograph, name).default
        constraint = tag_to_layout_constraint(layout_constraint_tag(operator, with_default=True))
        make_fallback(operator, layout_constraint=constraint, warn=False, override_decomp=True)
