"""monograph::region and monograph::region_backward: a decoder layer as one operator.

    region(layer, call, trained, mode, autocast, hidden, seed, inputs, parameters) -> [output, kind, *kept]
    region_backward(layer, hidden, seed, inputs, parameters, kind, kept, dy, dbeside, wanted)
        -> [dhidden, *dinputs, *dparameters]

layer: the layer's word in the registry; its frozen tensors are looked up there at each call. call: what else
the layer is called with (call.py). trained: how `parameters` lie (trained.py). mode: of trace.MODES.
autocast: the dtype that torch.autocast casts to, "" if it is off; an argument, because a compiled graph runs
with autocast off. seed: int64 [], what dropouts draw from. kind: int64 [], the number of the forward
(forwards.py): backward uses its trace and its frozen tensors, whatever became of the layer since. kept begins
with what the layer gives beside the hidden states, whose gradients are `dbeside`. wanted: which of the inputs
are differentiated, as `call` says.
"""

from __future__ import annotations

from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.training.regions.call import differentiated
from monograph.training.regions.forwards import forward_of, keep_forward
from monograph.training.regions.layer_function import beside
from monograph.training.regions.registry import Called, check_parameters, layer_of, traced_for
from monograph.training.regions.trace import KEEP

torch.library.define(
    "monograph::region",
    "(str layer, str call, str trained, str mode, str autocast, Tensor hidden, Tensor? seed, "
    "Tensor[] inputs, Tensor[] parameters) -> Tensor[]",
)
torch.library.define(
    "monograph::region_backward",
    "(str layer, Tensor hidden, Tensor? seed, Tensor[] inputs, Tensor[] parameters, Tensor kind, "
    "Tensor[] kept, Tensor dy, Tensor[] dbeside, int[] wanted) -> Tensor[]",
)


def _promised(layer: str) -> dict[tuple[str, ...], int]:
    """How many tensors graphs carry to backward, by the arguments of a call. Goes with the layer."""
    promised: dict[tuple[str, ...], int] = vars(layer_of(layer)).setdefault("region_promised", {})
    return promised


def _activations(hidden: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A trace is of contiguous tensors."""
    return [hidden.contiguous(), *(t.contiguous() for t in inputs)]


@torch.library.impl("monograph::region", "CompositeExplicitAutograd")
def _region(
    layer: str,
    call: str,
    trained: str,
    mode: str,
    autocast: str,
    hidden: torch.Tensor,
    seed: torch.Tensor | None,
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
) -> list[torch.Tensor]:
    activations = _activations(hidden, inputs)
    traced, state = traced_for(Called(layer, call, trained, mode, autocast, activations, seed))
    check_parameters(layer, trained, state, parameters)
    frozen = [state.tensors[name] for name in traced.frozen]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):  # casts are in the trace
        output, *kept = traced.forward(*activations, *_given(seed), *parameters, *frozen, *state.streams)
        for name in reversed(traced.written):
            _write(state.tensors[name], kept.pop())
    number = keep_forward(layer_of(layer), traced, state.tensors, state.streams)
    # A graph that was made for another trace of the layer may carry more.
    missing = _promised(layer).get((call, trained, mode, autocast), 0) - len(kept)
    return [output, torch.tensor(number), *kept, *(hidden.new_empty(0) for _ in range(missing))]


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """As `tensor.data.clamp_` does; next to never, since values that are clamped stay so."""
    if not torch.equal(tensor, value):
        tensor.data.copy_(value)


def _given(seed: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if seed is None else [seed]


@torch.library.register_fake("monograph::region")
def _(layer, call, trained, mode, autocast, hidden, seed, inputs, parameters):  # type: ignore[no-untyped-def]
    output = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    results = [output, torch.empty((), dtype=torch.int64)]
    if mode != KEEP and not beside(layer_of(layer)):
        return results
    activations = [hidden, *inputs]
    traced, _ = traced_for(Called(layer, call, trained, mode, autocast, activations, seed))
    key, promised = (call, trained, mode, autocast), _promised(layer)
    promised[key] = max(len(traced.kept), promised.get(key, 0))
    return results + traced.kept_like(activations)


@torch.library.impl("monograph::region_backward", "CompositeExplicitAutograd")
def _region_backward(
    layer: str,
    hidden: torch.Tensor,
    seed: torch.Tensor | None,
    inputs: list[torch.Tensor],
    parameters: list[torch.Tensor],
    kind: torch.Tensor,
    kept: list[torch.Tensor],
    dy: torch.Tensor,
    dbeside: list[torch.Tensor],
    wanted: list[int],
) -> list[torch.Tensor]:
    forward = forward_of(int(kind), layer)
    traced = forward.traced
    if traced.backward is None:
        raise RuntimeError(f"region {layer}: the forward was told that no gradient is wanted")
    if len(kept) < len(traced.kept):
        raise RuntimeError(
            f"region {layer}: it changed after the step was compiled, and backward needs {len(traced.kept)} "
            f"tensors of the forward, the graph carries {len(kept)}; torch.compiler.reset() compiles anew"
        )
    kept = kept[: len(traced.kept)]
    read = forward.unchanged(layer)
    frozen = [read.get(name) for name in traced.frozen]
    given = (*_activations(hidden, inputs), *_given(seed), *parameters, *frozen, *forward.streams)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return list(traced.backward(*given, *kept, *(d.contiguous() for d in (dy, *dbeside))))


@torch.library.register_fake("monograph::region_backward")
def _(layer, hidden, seed, inputs, parameters, kind, kept, dy, dbeside, wanted):  # type: ignore[no-untyped-def]
    found = (hidden, *(inputs[place] for place in wanted), *parameters)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in found]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.layer, call, *_, hidden, seed, tensors, parameters = inputs
    ctx.wanted = list(differentiated(call))
    ctx.counts = (len(tensors), len(parameters), seed is not None)
    if type(output[1]) is torch.Tensor:  # not while a graph is traced
        ctx.forward = forward_of(int(output[1]), ctx.layer)
        ctx.frozen = ctx.forward.held()
    ctx.set_materialize_grads(False)
    ctx.beside = beside(layer_of(ctx.layer))
    ctx.mark_non_differentiable(output[1], *output[2 + ctx.beside :])
    ctx.save_for_backward(hidden, *_given(seed), *tensors, *parameters, *output[1:])


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    inputs, parameters, seeded = ctx.counts
    hidden, *rest = ctx.saved_tensors
    seed = rest.pop(0) if seeded else None
    tensors, rest = rest[:inputs], rest[inputs:]
    trained, (kind, *kept) = rest[:parameters], rest[parameters:]
    dy, dbeside = gradients[0], gradients[2 : 2 + ctx.beside]
    if dy is None and all(d is None for d in dbeside):
        return (None,) * 7 + ([None] * inputs, [None] * parameters)
    given = (dy, *dbeside)
    dy, *rest = (
        torch.zeros_like(t) if d is None else d for d, t in zip(given, (hidden, *kept), strict=False)
    )
    found = torch.ops.monograph.region_backward(
        ctx.layer, hidden, seed, tensors, trained, kind, kept, dy, rest, ctx.wanted
    )
    also: list[torch.Tensor | None] = [None] * inputs
    for place, gradient in zip(ctx.wanted, found[1:], strict=False):
        also[place] = gradient
    return None, None, None, None, None, found[0], None, also, list(found[1 + len(ctx.wanted) :])


register_autograd("region", _backward, _setup_context)
register_not_differentiable("region_backward")
