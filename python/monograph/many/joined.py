"""The rows of several adapters as one batch: one forward and one backward of the base for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from peft import get_peft_model
from torch import nn

from monograph.hf.optimize import optimize
from monograph.hf.peft.lora_experts import LoraExperts
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.many.lora_rows import LoraRows, RowPlan
from monograph.many.shared_base import with_same_base
from monograph.ops.seeded_dropout import SeededDropout
from monograph.ops.seeded_dropout_many import MOST_STREAMS
from monograph.packing.stateful_layers import guard_packed
from monograph.training import TrainStep
from monograph.training.batch_keys import KNOWN, Tensors
from monograph.training.loss import causal_parts, has_router_loss, logits_map, next_labels, token_losses
from monograph.training.micro_batches import mark_lengths
from monograph.training.regions import make_regions, outer_graph
from monograph.training.unique_code import with_unique_code
from monograph.upstream.torch_names import mark_dynamic

JOINED_MODES = ("graph", "eager")
_KEYS = ("input_ids", "labels", "position_ids", "cu_seqlens")


class Joined:
    """A model whose LoRA layers have the factors of all slots, each for its own rows.

    The parameters are those of the slots' own models, in a fixed order; whose rows are whose is data.
    """

    def __init__(self, base: nn.Module, steps: Sequence[TrainStep], mode: str) -> None:
        self._steps, self._mode = list(steps), mode
        refuse_what_is_not_joined(base, self._steps, mode)
        self._plan = torch.zeros(2 * len(self._steps) + 1, dtype=torch.int64)
        self.model = self._made(base)
        guard_packed(self.model)
        self._forward = self._losses
        if mode == "graph":
            make_regions(self.model)
            self._forward = torch.compile(with_unique_code(self._losses), backend=outer_graph, fullgraph=True)

    def gradients(self, turn: Mapping[int, tuple[int, Tensors, float]]) -> dict[int, torch.Tensor]:
        """Gradient, loss and zeros of each slot of a turn, as its tree sums them. turn: the number of
        its micro-batch, the tensors, and the targets of its step."""
        present, count = sorted(turn), len(self._steps)
        lengths = [turn[i][1]["input_ids"].shape[1] if i in turn else 0 for i in range(count)]
        self._plan[1 : count + 1] = torch.tensor(lengths).cumsum(0)
        for i in present:
            self._plan[count + 1 + i] = self._steps[i].seed_of(turn[i][0])
        self.model.train()
        losses = self._forward(self._batch([turn[i][1] for i in present]))
        begins, own = self._plan.tolist(), {}
        for i in present:
            # As causal_lm_loss sums and divides.
            mine = losses[:, begins[i] : begins[i + 1]]
            own[i] = (mine.sum(dtype=torch.float64) / torch.tensor(turn[i][2])).float()
        leaves = [p for i in present for p in self._steps[i].state.parameters]
        found = iter(torch.autograd.grad(list(own.values()), leaves, materialize_grads=True))
        made = {}
        for i in present:
            step = self._steps[i]
            pieces = [next(found) for _ in step.state.parameters]
            made[i] = step.as_summed(pieces, own[i].detach())
        return made

    def _batch(self, parts: Sequence[Tensors]) -> Tensors:
        """One row of all. Padding is a document of its own, and stays its adapter's."""
        joined = {
            name: torch.cat([part[name] for part in parts], dim=1) for name in ("input_ids", "position_ids")
        }
        joined["labels"] = torch.cat([next_labels(part["labels"]) for part in parts], dim=1)
        ends = [
            torch.cat([p["cu_seqlens"], p["cu_seqlens"].new_tensor([p["input_ids"].shape[1]])]) for p in parts
        ]
        lengths = torch.cat([end.diff() for end in ends])
        borders = torch.cat([lengths.new_zeros(1), lengths[lengths > 0]]).cumsum(0)
        joined["cu_seqlens"] = borders.to(torch.int32)
        if self._mode != "eager":
            for tensor in joined.values():
                mark_lengths(tensor, mark_dynamic)
        return joined

    def _losses(self, batch: Tensors) -> torch.Tensor:
        """Of each token, float32 [1, T]."""
        causal, body, head = causal_parts(self.model, "ManyStep")
        inputs = {name: batch[name] for name in KNOWN if name in batch and name != "labels"}
        hidden = body(**inputs, use_cache=False).last_hidden_state
        softcap, scale = logits_map(causal.config)
        return token_losses(hidden, head, batch["labels"], softcap=softcap, scale=scale)

    def _made(self, base: nn.Module) -> Any:
        names = [f"slot{i}" for i in range(len(self._steps))]
        models: list[Any] = [step.model for step in self._steps]
        configs = [model.peft_config["default"] for model in models]
        with torch.random.fork_rng(devices=[]):
            model: Any = get_peft_model(with_same_base(base), configs[0], adapter_name=names[0])
            for name, config in zip(names[1:], configs[1:], strict=True):
                model.add_adapter(name, config)
        optimize(model)
        model.base_model.set_adapter(names)
        layers: dict[str, Any] = {
            path: layer for path, layer in model.named_modules() if isinstance(layer, LoraLinear)
        }
        for number, (path, layer) in enumerate(layers.items()):
            layer.__class__ = LoraRows
            layer.adapters = tuple(names)
            # Numbers of this layer alone: a region tells the streams of its dropouts apart by them.
            layer.rows = RowPlan(self._plan, len(names) * MOST_STREAMS + number)
            for i, (name, step) in enumerate(zip(names, self._steps, strict=True)):
                if name in layer.lora_A:
                    self._take(layer, name, i, step.model.get_submodule(path))
        return model

    def _take(self, layer: Any, name: str, place: int, own: Any) -> None:
        """The parameters and the dropout of a slot's own layer."""
        for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
            if name in getattr(layer, part):
                mine, theirs = getattr(layer, part)[name], getattr(own, part)["default"]
                for key in [key for key, _ in mine.named_parameters(recurse=False)]:
                    setattr(mine, key, getattr(theirs, key))
        dropout = own.lora_dropout["default"]
        if isinstance(dropout, SeededDropout):
            stream = place * MOST_STREAMS + dropout.stream
            layer.lora_dropout[name] = SeededDropout(dropout.p, self._plan, stream)


def refuse_what_is_not_joined(base: Any, steps: Sequence[TrainStep], mode: str) -> None:
    """ValueError that names what is right only row by row: `rows="apart"` has it."""
    instead = 'wanted rows="apart"'
    if mode not in JOINED_MODES:
        raise ValueError(f'rows is "joined" and mode {mode!r}, wanted graph or eager, or rows="apart"')
    if has_router_loss(base.config):
        raise ValueError(
            f"rows is joined and the loss of routers a mean over all tokens of a batch, {instead}"
        )
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in base.modules()):
        raise ValueError(f"rows is joined and the base drops, over the rows of all alike, {instead}")
    for step in steps:
        if step.offload is not None:
            raise ValueError(f"rows is joined and options has offload, {instead}")
        if step.loss_scale is not None:
            raise ValueError(f"rows is joined and a loss is scaled, as float16 wants it, {instead}")
        for path, layer in step.model.named_modules():
            if isinstance(layer, LoraExperts):
                raise ValueError(f"rows is joined and {path} adapts experts, {instead}")
            adapted = hasattr(layer, "lora_A") and hasattr(layer, "base_layer")
            if adapted and not (isinstance(layer, LoraLinear) and layer.fused):
                raise ValueError(f"rows is joined and {path} is a {type(layer).__name__}, {instead}")
            if (
                adapted
                and "default" in layer.lora_variant
                and isinstance(layer.lora_dropout["default"], nn.Dropout)
            ):
                raise ValueError(f"rows is joined and {path} has DoRA with dropout, {instead}")


def check_joined(name: str, batch: Tensors) -> Tensors:
    """A packed row, by the keys that such rows have."""
    if sorted(batch) != sorted(_KEYS):
        raise ValueError(
            f"adapter {name}: rows are joined and a micro-batch has {', '.join(sorted(batch))}, wanted "
            f'{", ".join(_KEYS)}, as PackedCollator makes them, or rows="apart"'
        )
    shape, borders = list(batch["input_ids"].shape), batch["cu_seqlens"]
    if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
        raise ValueError(
            f"adapter {name}: rows are joined and input_ids has shape {shape}, wanted one row of tokens"
        )
    # What of a neighbour's row a wrong border would reach has to be told here: behind it they are one row.
    numbers = borders.tolist()
    whole = borders.dtype in (torch.int32, torch.int64) and borders.dim() == 1 and numbers[:1] == [0]
    if not whole or any(a > b for a, b in pairwise(numbers)) or numbers[-1] > shape[1]:
        raise ValueError(
            f"adapter {name}: cu_seqlens is {numbers}, wanted whole ascending numbers from 0 to {shape[1]} "
            "at most"
        )
    return batch
