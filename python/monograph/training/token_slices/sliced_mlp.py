"""MLPs of decoder layers that are computed in slices of tokens, forward and backward.

Of an MLP with intermediate size i a backward holds five or six tensors [tokens, i]: most of what a
checkpointed step holds beside the inputs of its layers. In slices they are [slice, i].
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from monograph.distributed.shard import sharded_units
from monograph.nn.repeated_layers import repeated_layers
from monograph.ops import token_slices as _operators  # noqa: F401  (registers the operators)
from monograph.ops.seeded_dropout import SeededDropout
from monograph.training.regions.call import described
from monograph.training.regions.layer_function import Request
from monograph.training.regions.layer_signature import State, state_of
from monograph.training.regions.reads import Reads
from monograph.training.regions.trace import FORWARD, RECOMPUTE
from monograph.training.regions.trained import one_by_one
from monograph.training.token_slices.body import make_body
from monograph.upstream.instance_class import put_before, take_off

MODES = ("graph", "whole_step", "eager")
_CALL = described(((b"*",), {}))


class Bodies:
    """The bodies of the MLPs of a model by all that a trace depends on. A copy of a model makes its own."""

    def __init__(self) -> None:
        self.found: dict[Any, tuple[str, Reads]] = {}

    def __deepcopy__(self, memo: Any) -> Bodies:
        return Bodies()

    def __reduce__(self) -> Any:
        return Bodies, ()


class SlicedMlp(nn.Module):
    mlp_slices: int  # 0: of SLICE tokens each
    region_bodies: Bodies  # of the whole model; no part of what a layer is
    sliced_original: type[nn.Module]

    def __init_subclass__(cls) -> None:
        if cls.__bases__[0] is SlicedMlp:
            cls.sliced_original = cls.__bases__[1]

    @staticmethod
    def region_forward(layer: Any, *args: Any) -> Any:
        return layer.sliced_original.forward(layer, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError("tiled_mlp in a layer that is traced as it is, wanted regions or eager mode")
        if not self.training and type(x) is torch.Tensor:  # generation, token by token
            return self.region_forward(self, x)
        return in_slices(self, x)


def in_slices(module: SlicedMlp, x: torch.Tensor) -> torch.Tensor:
    state = state_of(module)
    if state.hooked is not None:
        raise RuntimeError(f"tiled_mlp: {state.hooked} has a hook, wanted none: a slice would run it again")
    dropouts = [m for m in module.modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
    seeds = [m.seed for m in dropouts if isinstance(m, SeededDropout)]
    if len(seeds) < len(dropouts):
        raise RuntimeError(
            "tiled_mlp: a dropout draws from torch's generator, wanted TrainStep, whose masks are told their "
            "place, or lora_dropout: 0"
        )
    grad = torch.is_grad_enabled()
    drawn_from = {f"{path}.seed" for path, m in module.named_modules() if isinstance(m, SeededDropout)}
    named = {name: t for name, t in state.tensors.items() if name not in drawn_from}
    trained = {name: t for name, t in named.items() if grad and t.requires_grad}
    frozen = {name: t for name, t in named.items() if name not in trained}
    seed = seeds[0] if seeds else None
    word = _word(module, state, x, trained, frozen, seed)
    return torch.ops.monograph.token_slices(
        word, x, seed, list(trained.values()), list(frozen.values()), state.streams, module.mlp_slices
    )


def _word(
    module: SlicedMlp,
    state: State,
    x: torch.Tensor,
    trained: dict[str, torch.Tensor],
    frozen: dict[str, torch.Tensor],
    seed: torch.Tensor | None,
) -> str:
    grad = torch.is_grad_enabled()
    autocasts = ""
    if torch.is_autocast_enabled(x.device.type):
        autocasts = str(torch.get_autocast_dtype(x.device.type)).removeprefix("torch.")
    key = (state.key, grad, x.dtype, x.shape[-1], seed is not None, autocasts)
    bodies = module.region_bodies.found
    known = bodies.get(key)
    if known is not None and known[1].changed() is None:
        return known[0]
    with ThreadPoolExecutor(max_workers=1) as thread:  # sees nothing of a tracer around
        request = thread.submit(_request, module, x, trained, frozen, seed, autocasts, grad).result()
    try:
        bodies[key] = made = make_body(request)
    except Exception as error:
        kind = type(module).__name__
        raise RuntimeError(f"tiled_mlp: {kind} cannot be computed in slices of tokens: {error}") from error
    return made[0]


def _request(
    module: SlicedMlp,
    x: torch.Tensor,
    trained: dict[str, torch.Tensor],
    frozen: dict[str, torch.Tensor],
    seed: torch.Tensor | None,
    autocasts: str,
    grad: bool,
) -> Request:
    """On tensors whose memory nobody touches."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    return Request(
        layer=module,
        call=_CALL,
        layout=one_by_one(trained),
        mode=RECOMPUTE if grad else FORWARD,
        activations=[torch.empty(1, 16, x.shape[-1], dtype=x.dtype)],
        seed=None if seed is None else torch.zeros((), dtype=torch.int64),
        trained=[like(t) for t in trained.values()],
        frozen={name: like(t) for name, t in frozen.items()},
        autocasts=autocasts,
    )


def slice_mlps(model: nn.Module, slices: int | None = None) -> nn.Module:
    """The MLPs of the repeated layers of a model are computed in slices of tokens, in place.

    slices: how many; None: slices of 1,024 tokens. No bit of loss, gradient or output changes. What cannot be
    sliced is refused.
    """
    if slices is not None and (type(slices) is not int or slices < 1):
        raise ValueError(f"slices is {slices!r}, wanted a whole number, 1 or more, or None")
    mlps: dict[str, Any] = {
        path: getattr(layer, "mlp", None) for path, layer in repeated_layers(model).items()
    }
    if not mlps:
        raise ValueError(f"tiled_mlp: {type(model).__name__} has no layer that transformers can checkpoint")
    for path, mlp in mlps.items():
        if not hasattr(mlp, "monograph_activation"):  # what optimize takes over has it
            found = "no mlp" if mlp is None else f"the MLP {type(mlp).__name__}"
            raise ValueError(
                f"tiled_mlp: {path} has {found}, wanted a gated MLP that monograph.optimize knows, on the CPU"
            )
    bodies = Bodies()
    for mlp in mlps.values():
        if not isinstance(mlp, SlicedMlp):
            put_before(SlicedMlp, mlp)
        mlp.mlp_slices, mlp.region_bodies = slices or 0, bodies
    return model


def whole_mlps(model: nn.Module) -> nn.Module:
    """Undoes `slice_mlps`."""
    for mlp in sliced_mlps(model):
        take_off(SlicedMlp, mlp)
        del mlp.mlp_slices, mlp.region_bodies
    return model


def check_sliced(model: nn.Module, mode: str) -> None:
    """Refuses what a step of a mode cannot compute in slices."""
    mlps = sliced_mlps(model)
    if not mlps:
        return
    if mode not in MODES:
        raise ValueError(f"tiled_mlp with mode {mode!r}, wanted one of {', '.join(MODES)}: it generates code")
    if sharded_units(model):
        raise ValueError(
            "tiled_mlp on a sharded base, wanted shard_size: 1: a layer gathers its weights once"
        )


def sliced_mlps(model: nn.Module) -> list[SlicedMlp]:
    return [m for m in model.modules() if isinstance(m, SlicedMlp)]
