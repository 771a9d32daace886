"""PackedExperts: a layer of experts whose weights stay packed, forward and backward, as one operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from monograph.nn.lazy_weight import LazyWeight
from monograph.ops.ep_experts import ep_experts
from monograph.ops.experts import Activation, experts
from monograph.ops.experts_arguments import Weight
from monograph.ops.layout import plain_layout
from monograph.quant.stack_pair import (
    Stack,
    StackPair,
    as_argument,
    as_dtype,
    part_names,
    stacks_of,
    tensors_of,
    with_tensors,
)
from monograph.upstream.calling_module import calling_module
from monograph.upstream.torch_names import parameters_of

DOWN = "down_proj"


@dataclass(frozen=True)
class ExpertsKind:
    """What a layer of experts computes and how its parameters lie."""

    activation: Activation
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0
    transposed: bool = False  # its parameters are [E, in, out]; packed bytes always are [E, out, in]
    bias: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """Of the parameters of the first product and of the second."""
        return ("gate_up_proj" if self.activation.gated else "up_proj"), DOWN


class LowRank(NamedTuple):
    """LoRA on one of the two weights, in PEFT's layout: a [r E, in] and b [out, r E]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class ExpertShare:
    """The experts [first, first + held) of `count` are here, the others on other ranks of `group`, which is a
    number of ops/ep_experts.py; ranks: how many they are. adapter: factors of LoRA lie as the experts do;
    else each rank has all of them."""

    first: int
    held: int
    count: int
    group: int
    ranks: int
    adapter: bool = False

    def refuse(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"{how}: experts {self.first} to {self.first + self.held - 1} of {self.count} are here, the "
            f"others on {self.ranks - 1} other ranks (expert_parallel); wanted the model as it was loaded: "
            "the adapter's folder and that of the base have all of it"
        )


def run_experts(
    kind: ExpertsKind,
    weights: tuple[Weight, Weight],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    lora: Mapping[str, LowRank],
    transposed: bool,
    share: ExpertShare | None = None,
) -> torch.Tensor:
    """One call of the operator on [T, H]; under autocast, too, the result has the dtype of the input."""
    x = hidden_states
    routed = top_k_weights if top_k_weights.dtype in (x.dtype, torch.float32) else top_k_weights.float()
    first, second = kind.names
    options: dict[str, Any] = {
        "bias": biases,
        "lora1": lora.get(first),
        "lora2": lora.get(second),
        "activation": kind.activation,
        "interleaved": kind.interleaved,
        "alpha": kind.alpha,
        "limit": kind.limit,
        "transposed": transposed,
    }
    if share is None:
        y = experts(x, top_k_index.long(), routed, *weights, **options, save=torch.is_grad_enabled())
    else:
        options |= {"count": share.count, "group": share.group}
        y = ep_experts(x, top_k_index.long(), routed, *weights, **options)
    return y.to(x.dtype)


@dataclass(frozen=True)
class TransposedStack:
    """A packed [E, out, in] as the [E, in, out] that a transposed layer shows."""

    stack: Stack

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, cols = self.stack.shape
        return count, cols, rows

    @property
    def device(self) -> torch.device:
        return self.stack.device

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.stack.dequantize(dtype).transpose(1, 2)


def _stored(layer: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter, or what stands before it while a sharded layer is gathered."""
    found = layer.__dict__.get(name)
    return parameters_of(layer).get(name) if found is None else found


def _shown(name: str) -> Any:
    """A dense parameter if there is one, else the packed weight as one."""

    def get(layer: PackedExperts) -> torch.Tensor:
        dense = _stored(layer, name)
        if dense is not None:
            return dense
        if name not in layer.stacks:
            raise AttributeError(f"PackedExperts has no {name}")
        return layer.show(name)

    return property(get)


class PackedExperts(nn.Module):
    """A frozen layer of experts, made of a dense one in place: `PackedExperts.take_over(layer, kind)`, then
    `put_packed` for each weight.

    The stored tensors are ordinary uint8 parameters: `gate_up_proj_values` and its scales, `down_proj_values`
    and its scales; of gate and up as two stacks `gate_up_proj_gate_values` and `gate_up_proj_up_values`.
    `gate_up_proj` and `down_proj` are honest for code that looks at them: they have the shape
    of the dense parameters, the compute dtype and the device, and dequantise themselves if computed with.
    """

    gate_up_proj = _shown("gate_up_proj")
    up_proj = _shown("up_proj")
    down_proj = _shown(DOWN)

    experts_kind: ExpertsKind
    stacks: dict[str, Stack]  # what is packed, without its tensors' devices: see `packed`
    weight_dtype: torch.dtype
    expert_share: ExpertShare | None = None  # `stacks` are then those of this rank's experts

    @classmethod
    def take_over(cls, layer: nn.Module, kind: ExpertsKind) -> PackedExperts:
        """Turns a dense layer into one whose weights may be packed. Its parameters stay until then."""
        layer.__class__ = cls
        made: Any = layer
        made.experts_kind = kind
        made.stacks = {}
        made.weight_dtype = getattr(made, kind.names[0]).dtype
        return made

    def put_packed(self, name: str, packed: Stack) -> None:
        """Replaces the parameter `name` by packed bytes, [E, out, in]."""
        if any(one.columns is not None for one in stacks_of(packed)):
            raise ValueError(f"{name}: experts are {packed!r}, wanted columns in order")
        if isinstance(packed, StackPair):
            packed = replace(packed, alternate=self.experts_kind.interleaved)
        shown = self._as_shown(packed)
        wanted = tuple(getattr(self, name).shape)
        if shown.shape != wanted:
            raise ValueError(f"{name}: the packed weight has shape {shown.shape}, wanted {wanted}")
        parameters_of(self).pop(name, None)
        tensors = tensors_of(packed)
        for part, tensor in zip(part_names(packed, name), tensors, strict=True):
            self.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
        kept = torch.empty(0, dtype=torch.uint8, device="meta")
        self.stacks[name] = with_tensors(packed, [kept] * len(tensors))

    def put_dense(self, name: str, weight: torch.Tensor) -> Stack:
        """Replaces packed bytes by a dense parameter of the shown shape; returns what was packed."""
        packed = self.packed(name)
        for part in part_names(packed, name):
            del parameters_of(self)[part]
        del self.stacks[name]
        parameters_of(self)[name] = nn.Parameter(weight, requires_grad=False)
        return packed

    def packed(self, name: str) -> Stack:
        if self.expert_share is not None:
            self.expert_share.refuse(name)
        return self.held(name)

    def held(self, name: str) -> Stack:
        """`packed`, of the experts that are here."""
        tensors = [tensor.detach() for tensor in self._tensors(name)]
        return as_dtype(with_tensors(self.stacks[name], tensors), self.weight_dtype)

    def _tensors(self, name: str) -> list[torch.Tensor]:
        found = [_stored(self, part) for part in part_names(self.stacks[name], name)]
        return [tensor for tensor in found if tensor is not None]

    def dequantize(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense parameter, a new tensor each time."""
        return self._as_shown(self.packed(name)).dequantize(dtype or self.weight_dtype).contiguous()

    def stored_names(self, name: str) -> list[str]:
        """The parameters that hold a packed weight: its values and its scales."""
        return part_names(self.stacks[name], name)

    def _as_shown(self, packed: Stack) -> Stack | TransposedStack:
        return TransposedStack(packed) if self.experts_kind.transposed else packed

    def show(self, name: str) -> LazyWeight:
        """A packed weight in the shape of the dense parameter."""
        return LazyWeight(self._as_shown(self.packed(name)), self.weight_dtype)  # type: ignore[arg-type]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Asked for its own alone, as PEFT's `target_parameters` asks, it shows its packed weights too. Not
        to torch.distributed: `fully_shard` would shard dense copies of them."""
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        if (
            self.expert_share is None
            and not recurse
            and not calling_module(2).startswith("torch.distributed.")
        ):
            for name in self.experts_kind.names:
                if name in self.stacks:
                    yield f"{prefix}.{name}" if prefix else name, self.show(name)  # type: ignore[misc]

    def _weight(self, name: str, turn: bool) -> Weight:
        if name not in self.stacks:
            dense: Any = _stored(self, name)
            dense = dense.transpose(1, 2).contiguous() if turn else dense
            return dense, [], plain_layout(dense.shape)
        return as_argument(self.stacks[name], self._tensors(name))

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        lora: Mapping[str, LowRank] | None = None,
    ) -> torch.Tensor:
        kind = self.experts_kind
        first, second = kind.names
        # Packed bytes are [E, out, in]; a dense weight beside them is transposed to lie alike.
        turn = kind.transposed and len(self.stacks) > 0  # torch 2.11 traces no bool() of a dict
        biases = (
            (getattr(self, f"{first}_bias"), getattr(self, f"{second}_bias")) if kind.bias else (None, None)
        )
        return run_experts(
            kind,
            (self._weight(first, turn), self._weight(second, turn)),
            biases,
            hidden_states,
            top_k_index,
            top_k_weights,
            lora or {},
            kind.transposed and not turn,
            self.expert_share,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> PackedExperts:
        # Casting a model casts the dtype that the weights report, and no stored byte.
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        weights = ", ".join(
            f"{name}={list(self._as_shown(p).shape)} {' and '.join(one.format.name for one in stacks_of(p))}"
            for name, p in self.stacks.items()
        )
        return f"activation={self.experts_kind.activation.name.lower()}, {weights}"
