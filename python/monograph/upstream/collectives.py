"""Collectives of torch as operators: a graph holds them as nodes, and outside of one they are the same.

torch's own wrappers give tensors of a class of their own outside of graphs, and have other names in other
versions; the operators behind them do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monograph.upstream.torch_names import functional_operators, wait_tensor


def all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks, in any order. Outside of a graph it replaces `tensor`."""
    if torch.compiler.is_compiling():
        return wait_tensor(functional_operators.all_reduce(tensor, "sum", group.group_name))
    return wait_tensor(functional_operators.all_reduce_(tensor, "sum", group.group_name))


def all_to_all_single(
    tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any
) -> torch.Tensor:
    """`sent` numbers of elements go to each rank, `received` come from each, behind each other."""
    return wait_tensor(
        functional_operators.all_to_all_single(tensor, list(received), list(sent), group.group_name)
    )


def all_gather_into_tensor(tensor: torch.Tensor, ranks: int, group: Any) -> torch.Tensor:
    """`tensor` of every rank behind each other along the first dimension."""
    return wait_tensor(functional_operators.all_gather_into_tensor(tensor, ranks, group.group_name))


def all_gather_to(out: torch.Tensor, tensor: torch.Tensor, ranks: int, group: Any) -> None:
    """`all_gather_into_tensor` into memory that is there. Not inside a graph."""
    wait_tensor(functional_operators.all_gather_into_tensor_out(tensor, ranks, group.group_name, out=out))
