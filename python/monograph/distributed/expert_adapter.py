"""The LoRA factors of experts that are spread over ranks: each rank keeps those of its own experts.

PEFT has factors of all experts in two matrices, a [r E, in] with rows e r + j and b [out, r E] with columns
j E + e. Their parameters stay in their places and become shares. What is written is whole: the first rank
gathers one parameter after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_routes import owned
from monograph.nn.packed_experts import PackedExperts
from monograph.ops.ep_experts import group_numbered
from monograph.upstream.peft_names import ParamWrapper

_FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class FactorCut:
    """One factor of `count` experts; rows: it is an a, with the rows of an expert behind each other."""

    rows: bool
    count: int
    group: ExpertGroup

    @property
    def held(self) -> int:
        return len(owned(self.group.rank, self.group.size, self.count))

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """Of a share's."""
        first, second = shape
        if self.rows:
            return torch.Size((first // self.held * self.count, second))
        return torch.Size((first, second // self.held * self.count))

    def share(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Of this rank's experts, or another's; contiguous."""
        own = owned(self.group.rank if rank is None else rank, self.group.size, self.count)
        each = self._by_expert(whole, self.count)
        part = each[own.start : own.stop] if self.rows else each[..., own.start : own.stop]
        return part.flatten(0, 1).contiguous() if self.rows else part.flatten(1).contiguous()

    def _by_expert(self, t: torch.Tensor, count: int) -> torch.Tensor:
        return t.reshape(count, -1, t.shape[1]) if self.rows else t.reshape(t.shape[0], -1, count)

    def gathered(self, piece: torch.Tensor) -> torch.Tensor | None:
        """The whole of the shares, on the group's first rank. A collective."""
        group = self.group
        if group.rank:
            group.swap(0, [piece], 0, [])
            return None
        whole = piece.new_empty(self.whole_shape(piece.shape))
        target = self._by_expert(whole, self.count)
        for rank in range(group.size):
            own = owned(rank, group.size, self.count)
            view = target[own.start : own.stop] if self.rows else target[..., own.start : own.stop]
            if rank:
                part = torch.empty(view.shape, dtype=piece.dtype)
                group.swap(rank, [], rank, [part])
            else:
                part = self._by_expert(piece, len(own))
            view.copy_(part)
        return whole


def group_of_layer(layer: PackedExperts) -> ExpertGroup:
    assert layer.expert_share is not None
    exchange: Any = group_numbered("expert_parallel", layer.expert_share.group)
    group: ExpertGroup = exchange.group
    return group


def _parameters(model: nn.Module) -> Iterator[tuple[str, Any, Any, str]]:
    """(name, wrapper, the linear layer that holds it, lora_A or lora_B) of each factor of spread experts."""
    for path, wrapper in model.named_modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        base: Any = wrapper.get_base_layer()
        if getattr(base, "expert_share", None) is None:
            continue
        for which in _FACTORS:
            for adapter, linear in getattr(wrapper, which).items():
                yield f"{path}.{which}.{adapter}.weight", wrapper, linear, which


def factor_cuts(model: nn.Module) -> dict[str, FactorCut]:
    """By the names of the parameters; empty where the adapter is whole."""
    found = {}
    for name, wrapper, _, which in _parameters(model):
        base = wrapper.get_base_layer()
        if base.expert_share.adapter:
            found[name] = FactorCut(which == "lora_A", base.expert_share.count, group_of_layer(base))
    return found


def wrappers_of_cut(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """For the name of a cut parameter its wrapper and the key of `given` there."""
    found = {}
    for name, wrapper, _, _ in _parameters(model):
        if wrapper.get_base_layer().expert_share.adapter:
            _, which, adapter, _ = name.rsplit(".", 3)
            found[name] = (wrapper, f"{which}.{adapter}")
    return found


@torch.no_grad()
def cut_factors(model: nn.Module) -> None:
    """Leaves each rank the factors of its own experts, of a model whose layers are cut already."""
    cuts = factor_cuts(model)
    for name, _, linear, _ in _parameters(model):
        linear.weight.data = cuts[name].share(linear.weight.data).clone()
        hook = partial(_refuse_share, cuts[name].whole_shape(linear.weight.shape))
        linear.register_state_dict_pre_hook(hook)


def _refuse_share(whole: torch.Size, linear: nn.Module, prefix: str, keep_vars: bool) -> None:
    found: Any = linear.weight
    if found.shape != whole:
        raise RuntimeError(
            f"state_dict: {prefix}weight is {list(found.shape)}, a share of {list(whole)}: each rank has the "
            "factors of its own experts (expert_parallel); wanted monograph.whole_adapter(model) around what "
            "writes them, on every rank"
        )


@contextmanager
def whole_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, rank 0 has the whole adapter, and may write it; the others keep their shares.

        with mg.whole_adapter(model):
            if world.first:
                model.save_pretrained(folder)

    A collective of all ranks on entering, where experts and their factors are spread; else it does nothing.
    """
    cuts = factor_cuts(model)
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        for name, _, linear, _ in _parameters(model):
            cut = cuts.get(name)
            if cut is not None and cut.group.place == 0:
                whole = cut.gathered(linear.weight.detach())
                if whole is not None:
                    kept.append((linear.weight, linear.weight.data))
                    linear.weight.data = whole
        yield
    finally:
        for parameter, share in kept:
            parameter.data = share


def whole_shapes(model: nn.Module) -> Mapping[str, torch.Size]:
    """Of the cut parameters, by name: the same on every rank."""
    own = dict(model.named_parameters())
    return {name: cut.whole_shape(own[name].shape) for name, cut in factor_cuts(model).items()}
