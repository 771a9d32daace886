"""Experts of a folder that is quantised: stacks are taken as they are, single experts become one stack.

Experts that were stored one by one keep their own scales: each matrix stays a grid of its own in the stack,
gate and up apart. The copy is made once, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from monograph.hf.transformers.experts import experts_kind
from monograph.nn.packed_experts import PackedExperts
from monograph.ops.formats import BlockShape
from monograph.quant.packed_weight import PackedWeight
from monograph.quant.quant_methods.quant_method import QuantMethod
from monograph.quant.stack_pair import Stack, StackPair, as_dtype
from monograph.upstream.transformers_names import mark_initialized, original_patterns

STACKS = ("gate_up_proj", "up_proj", "down_proj")  # the parameters of a layer of experts


def put_experts(layer: nn.Module, name: str, packed: Stack) -> None:
    """One of the two weights of a layer of experts; the first that arrives takes the layer over."""
    made = layer
    if not isinstance(made, PackedExperts):
        made = PackedExperts.take_over(layer, experts_kind(layer))
    made.put_packed(name, as_dtype(packed, made.weight_dtype))
    mark_initialized(made)


def stack_pattern(part: str) -> str:
    """What transformers looks for in a checkpoint: the whole end of a name."""
    return rf"experts\.{part}$"


def as_weight(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a stack, found by `stack_pattern`, under the names that they have for a linear layer."""
    found = {}
    for key, value in tensors.items():
        name = next((name for name in STACKS if key.startswith(stack_pattern(name)[:-1])), None)
        end = key if name is None else key.removeprefix(stack_pattern(name)[:-1]).removesuffix("$")
        found[key if name is None else "weight" + end] = value
    return found


def stack_tensors(method: QuantMethod, path: str, layer: PackedExperts) -> dict[str, torch.Tensor]:
    """What a folder holds for the packed weights of a layer: `monograph quantize --experts stack`."""
    found = {}
    for name in layer.stacks:
        packed = layer.packed(name)
        if isinstance(packed, StackPair):
            raise ValueError(f"{path}.{name}: gate and up of a GGUF file, which is not written again")
        if packed.grid_rows:
            groups = packed.format.shape is BlockShape.GROUP
            how = "--to int4|int8|fp8 --experts separate" if groups else "--experts stack"
            raise NotImplementedError(
                f"{path}.{name}: experts that were packed one by one keep their own scales and cannot be "
                f"saved as a stack; save the adapter, or quantise with `monograph quantize {how}`"
            )
        for part, tensor in method.unpack(packed).items():
            found[f"{path}.{name}{part.removeprefix('weight')}"] = tensor
    return found


def is_merge_of_experts(conversion: Any) -> bool:
    """Whether transformers makes a stack of single experts by it, and single experts of a stack in saving."""
    sources, targets = original_patterns(conversion)
    single = all(source.endswith(".weight") and ".*." in source for source in sources)
    return single and len(targets) == 1 and targets[0].endswith(STACKS)


def conversions_of_stacks(method: QuantMethod, conversions: list[Any]) -> list[Any]:
    """What saving reverts if experts stay stacks in the folder."""
    known = {original_patterns(one)[0][0] for one in conversions}
    kept = []
    for one in conversions:
        if not is_merge_of_experts(one):
            parts = renamed_parts(method, one)
            kept += [*(part for part in parts if original_patterns(part)[0][0] not in known), one]
    return kept


def renamed_parts(method: QuantMethod, conversion: Any) -> list[Any]:
    """Of a name that transformers has for a stack (Granite's), those of its scales."""
    sources, targets = original_patterns(conversion)
    if len(sources) != 1 or not sources[0].endswith("weight") or not targets[0].endswith(STACKS):
        return []
    ends = [part.removeprefix("weight") for part in method.parts if part.startswith("weight_")]
    return [type(conversion)(sources[0] + end, targets[0] + end) for end in ends]


def stack(matrices: list[list[PackedWeight]]) -> PackedWeight:
    """`matrices[expert]` lie one behind the other in an expert; all experts as one weight [E, rows, cols]."""
    flat = [matrix for expert in matrices for matrix in expert]
    first = flat[0]
    if any(matrix.columns is not None for matrix in flat):
        raise ValueError(f"experts are {first!r}, wanted columns in order: act-order is for linear layers")
    sizes = [s.numel() for s in first.scales]
    for matrix in flat:
        if (matrix.layout, [s.numel() for s in matrix.scales]) != (first.layout, sizes):
            raise ValueError(f"experts are {first!r} and {matrix!r}, wanted all alike")
    scales = []
    for i in range(len(first.scales)):
        own = [matrix.scales[i].reshape(-1) for matrix in flat]
        if len(first.scales) == 4 and i == 2:  # the map of quantised scales: one for all
            if not all(torch.equal(one, own[0]) for one in own):
                raise ValueError("experts have different maps of quantised scales, wanted one for all")
            scales.append(own[0])
        else:
            scales.append(torch.cat(own))
    rows, cols = first.shape
    shape = (len(matrices), rows * len(matrices[0]), cols)
    values = torch.cat([matrix.values.reshape(-1) for matrix in flat])
    return replace(first, shape=shape, values=values, scales=tuple(scales), grid_rows=rows)


def stacked(
    method: QuantMethod, config: Mapping[str, Any], collected: Mapping[str, Any], dtype: torch.dtype
) -> PackedWeight | torch.Tensor:
    """A stack from tensors of single experts: {"…experts.*.gate_proj.weight_scale": [one for each expert]}.
    Sources stand in the order in which an expert holds them. Dense ones give a dense stack. `config` is the
    folder's quantization_config."""
    matrices: dict[str, dict[str, list[torch.Tensor]]] = {}
    parts = sorted(method.parts, key=len, reverse=True)
    for source, tensors in collected.items():
        part = next(part for part in parts if source.endswith(f".{part}"))
        each = tensors if isinstance(tensors, list) else [tensors]
        matrices.setdefault(source.removesuffix(part), {})[part] = each
    counts = {len(each) for parts in matrices.values() for each in parts.values()}
    if len(counts) != 1:
        found = {source: len(each) for source, each in collected.items()}
        raise ValueError(f"experts have {found} tensors, wanted as many of each")
    experts = []
    for expert in range(counts.pop()):
        own = [{part: each[expert] for part, each in parts.items()} for parts in matrices.values()]
        for tensors in own:
            method.check_parts(config, tensors)
        experts.append([(tensors, method.pack(tensors, dtype)) for tensors in own])
    packed = [[weight for _, weight in expert if isinstance(weight, PackedWeight)] for expert in experts]
    if not any(packed):
        return torch.stack([torch.cat([tensors["weight"] for tensors, _ in expert]) for expert in experts])
    if any(len(own) != len(matrices) for own in packed):
        raise ValueError("some experts are packed and some are dense, wanted all alike")
    return stack(packed)
