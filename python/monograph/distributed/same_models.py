"""What ranks must have alike before they compute together, compared and named where it differs.

One number of each rank is exchanged; only if they differ every rank tells what it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from monograph.distributed.expert_adapter import whole_shapes
from monograph.distributed.world import World, device_of, gathered_over
from monograph.upstream.collectives import all_gather_into_tensor
from monograph.upstream.torch_names import children

_LEFT_OUT = frozenset({*vars(nn.Module()), "kwargs"})  # what nn.Module keeps, and what PEFT made a layer with
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


def check_same_adapters(model: nn.Module, world: World) -> None:
    """Raises on every rank if the adapters have other constants (alpha, rank, scaling, dropout) somewhere."""
    if world.size > 1:
        compare("adapters", lambda: constants_of_adapters(model), [world.group])


def compare(what: str, described: Callable[[], Mapping[str, str]], groups: Sequence[Any]) -> None:
    """Raises on every rank, with the first name that is not described alike on all ranks of a mesh.

    groups: of each of its dimensions, the inner one first.
    """
    own = described()
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).digest()
    numbers = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device=device_of(groups[0]))
    for group in groups:
        numbers = all_gather_into_tensor(numbers, group.size(), group)
    if len(set(numbers.tolist())) == 1:
        return
    ranks = [(dist.get_rank(), dict(own))]
    for group in groups:
        ranks = [one for part in gathered_over(group, ranks) for one in part]
    ranks.sort(key=lambda one: one[0])
    first, wanted = ranks[0]
    for rank, found in ranks[1:]:
        for name in {**wanted, **found}:
            if wanted.get(name) != found.get(name):
                raise ValueError(
                    f"{what}: {name} is {wanted.get(name, 'missing')} on rank {first} and "
                    f"{found.get(name, 'missing')} on rank {rank}, wanted the same on all ranks"
                )


def constants_of_adapters(model: nn.Module) -> dict[str, str]:
    """The numbers and names that PEFT's layers compute with, and what is trained."""
    adapters = adapter_modules(model)
    found = {}
    for path, module in model.named_modules():
        if module in adapters or hasattr(module, "adapter_layer_names"):
            for name, value in vars(module).items():
                text = None if name in _LEFT_OUT else _text(value)
                if text is not None:
                    found[f"{path}.{name}"] = text
    whole = whole_shapes(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = f"{parameter.dtype} {list(whole.get(name, parameter.shape))}"
    return found


def _text(value: Any) -> str | None:
    """None for what is no constant, nor a collection of constants."""
    if isinstance(value, _CONSTANTS):
        return repr(value)
    if isinstance(value, dict):
        parts = {repr(name): _text(part) for name, part in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = {str(place): _text(part) for place, part in enumerate(value)}
    elif isinstance(value, (set, frozenset)):
        return str(sorted(map(repr, value)))
    else:
        return None
    told = [f"{name}: {part}" for name, part in parts.items() if part is not None]
    return None if len(told) < len(parts) else "{" + ", ".join(told) + "}"


def adapter_modules(model: nn.Module) -> set[nn.Module]:
    """The modules of PEFT's adapters: one that is frozen now may be trained next."""
    found: set[nn.Module] = set()
    for module in model.modules():
        for name in (*getattr(module, "adapter_layer_names", ()), "modules_to_save"):
            container = children(module).get(name)
            found.update(container.modules() if container is not None else ())
        dropouts = children(module).get("lora_dropout")
        found.update(dropouts.modules() if dropouts is not None else ())
    return found


def digests(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Dtype, shape and a hash of all bytes of each."""
    found = {}
    for name, tensor in tensors:
        told = f"{tensor.dtype} {list(tensor.shape)}"
        if not tensor.is_meta:
            data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            told += f" with SHA-256 {hashlib.sha256(data).hexdigest()[:16]}"
        found[name] = told
    return found
