"""A model whole on each rank or cut by `mg.shard`, and whether it has the bits of one that nobody touched."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from peft import LoraConfig

import monograph as mg
from monograph.distributed import World
from monograph.nn import replace_linears
from support.sharded_cases import batch, same_bits
from support.tiny_models import tiny_llama

SAME, OTHER = "same bits", "OTHER BITS"


def base_model(other: bool = False) -> Any:
    """other: with other bytes in every frozen tensor."""
    model = tiny_llama(num_hidden_layers=1)
    replace_linears(model, "nf4", double_quant=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if other:
            parameter.view(-1).view(torch.uint8).add_(1)
    return model


def with_adapter(model: Any) -> Any:
    torch.manual_seed(1)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return mg.add_lora(model, lora)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(**batch(), use_cache=False).logits
    return found


def gradients(model: Any, call: Any, rank: int) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    call(**batch(1 + rank), use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> str:
    same = bool(want) and got.keys() == want.keys() and all(same_bits(got[name], want[name]) for name in want)
    return SAME if same else OTHER


class Case:
    """A column. model(): as the row gets it; whole(): the same without any of our sharding."""

    def __init__(self, world: World, cut: bool, folder: str) -> None:
        self.world, self.cut = world, cut
        self.folder = pathlib.Path(folder, "cut" if cut else "whole")

    def shard(self, model: Any) -> Any:
        return mg.shard(model, self.world) if self.cut else model

    def model(self, other: bool = False) -> Any:
        return self.shard(with_adapter(base_model(other)))

    @staticmethod
    def whole() -> Any:
        return with_adapter(base_model())

    def path(self, name: str, of_rank: bool = True) -> pathlib.Path:
        """of_rank: one for each rank."""
        found = self.folder / (f"{name}-{self.world.rank}" if of_rank else name)
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def as_whole(self, model: Any) -> str:
        return SAME if same_bits(logits(model), logits(self.whole())) else OTHER
