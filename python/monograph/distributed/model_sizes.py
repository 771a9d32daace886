"""What a plan must know of a model: its units, what it trains, what a token passes through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from monograph.distributed.expert_plan import Experts
from monograph.distributed.layer_bytes import Layout
from monograph.distributed.plan import Sizes, Unit
from monograph.distributed.shard import units_of
from monograph.nn import PackedExperts
from monograph.nn.packed_experts import DOWN
from monograph.nn.repeated_layers import repeated_layers
from monograph.upstream.torch_names import parameters_of


def read_sizes(model: nn.Module) -> Sizes:
    """Of a transformers model with its adapter; only shapes and dtypes count, so the meta device will do."""
    layers = repeated_layers(model)
    wrapped: Any = model
    config = wrapped.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    found = units_of(model)
    causal = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped
    head = causal.get_output_embeddings()
    ends = {*causal.get_input_embeddings().modules(), *head.modules()}
    stacks = [module for module in model.modules() if isinstance(module, PackedExperts)]
    spread = {id(p) for module in stacks for p in parameters_of(module).values()}
    units = tuple(
        Unit(
            one.path,
            Layout.of(one.tensors, 1).pieces,
            _gathers(one.users, ends),
            one.path in layers,
            tuple(name for name, p in one.tensors.items() if id(p) in spread),
        )
        for one in found
    )
    cut = {id(p) for unit in found for p in unit.tensors.values()}
    frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in cut]
    through = [list(_products(layer, chosen)) for layer in layers.values()]
    weights = sum(times * rows * cols for one in through for rows, cols, times in one)
    return Sizes(
        units=units,
        whole_bytes=sum(p.nbytes for p in frozen) + sum(b.nbytes for b in model.buffers()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layers=len(layers),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        working=max(sum(sizes) + max(sizes) for sizes in map(_through, through)),
        active=weights + sum(rows * cols for rows, cols, _ in _products(head, chosen)),
        float_bytes=causal.dtype.itemsize,
        experts=_experts(model, stacks, chosen, causal.dtype.itemsize),
    )


def _experts(model: nn.Module, stacks: list[PackedExperts], chosen: int, float_bytes: int) -> Experts | None:
    """Of a model with packed experts in its layers, which are all alike."""
    if not stacks:
        return None
    count, hidden, _ = stacks[0].stacks[DOWN].shape
    own = set(stacks)
    wrappers: list[Any] = [
        m for m in model.modules() if hasattr(m, "parameter_name") and hasattr(m, "get_base_layer")
    ]
    wrappers = [wrapper for wrapper in wrappers if wrapper.get_base_layer() in own]
    factors = [p for w in wrappers for part in (w.lora_A, w.lora_B) for p in part.parameters()]
    return Experts(
        layers=len(stacks),
        count=count,
        chosen=chosen,
        hidden=hidden,
        float_bytes=float_bytes,
        nbytes=sum(p.nbytes for m in stacks for p in parameters_of(m).values() if p is not None),
        trained=sum(p.numel() for p in factors if p.requires_grad),
    )


def _gathers(users: Mapping[str, nn.Module], ends: set[nn.Module]) -> int:
    """Of a micro-batch: forward, and backward again. That of the embedding does not read it, and the loss has
    its gradient when the forward ends."""
    return sum(1 if user in ends else 2 for user in users.values())


def _through(products: list[tuple[int, int, int]]) -> list[int]:
    """Floats of a token at both ends of each product."""
    return [times * (rows + cols) for rows, cols, times in products]


def _products(root: nn.Module, chosen: int) -> Iterator[tuple[int, int, int]]:
    """(outputs, inputs, how often for a token) of each frozen matrix; chosen: experts of a token."""
    for module in root.modules():
        if isinstance(module, PackedExperts):
            yield from ((stack.shape[1], stack.shape[2], chosen) for stack in module.stacks.values())
            continue
        if isinstance(module, nn.Linear):
            trained = any(p.requires_grad for p in module.parameters())
            if not trained:
                yield module.out_features, module.in_features, 1
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 3 and not parameter.requires_grad:  # dense experts
                yield parameter.shape[1], parameter.shape[2], chosen
