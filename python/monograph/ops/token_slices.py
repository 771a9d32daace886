"""monograph::token_slices and monograph::token_slices_backward: a row-wise module, slice of tokens by slice.

    token_slices(body, x, seed, trained, frozen, streams, slices) -> y, of the shape and dtype of x
    token_slices_backward(the same, dy) -> [dx, *dtrained]

body: the word of what is computed, in the registry here; monograph.training.token_slices makes bodies from
modules. trained, frozen: the module's tensors, in the order of the body. seed, streams: what its dropouts
draw from. slices: how many there are, of equal length but the last; 0: slices of SLICE tokens.

Nothing but x is kept for backward, which computes each slice again. Bits do not depend on the slices: a row
of y and dx has the bits it has in any batch, a mask is told its place, and a gradient of a factor is one
chain of fused multiply-adds in float32 that each slice continues (gram). Not differentiable twice. CPU only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.autograd import register_autograd, register_not_differentiable

SLICE = 1024  # tokens; each slice decodes the weights anew

torch.library.define(
    "monograph::token_slices",
    "(str body, Tensor x, Tensor? seed, Tensor[] trained, Tensor[] frozen, int[] streams, int slices) "
    "-> Tensor",
)
torch.library.define(
    "monograph::token_slices_backward",
    "(str body, Tensor x, Tensor? seed, Tensor[] trained, Tensor[] frozen, int[] streams, int slices, "
    "Tensor dy) -> Tensor[]",
)


@dataclass(frozen=True)
class Body:
    """forward(x, *seed, *trained, *frozen, *streams, first) -> [y]; backward(the same but for `first`, dy,
    first, *sums) -> [dx, *sums]; finish(*trained, *frozen, *sums) -> dtrained. first: the first row of the
    slice. sums: of gradients so far, None in the first slice."""

    forward: Any
    backward: Any
    finish: Any
    sums: int


_BODIES: list[Body] = []


def enter(body: Body) -> str:
    """The word of a body. Bodies stay: a compiled graph may ask for any."""
    _BODIES.append(body)
    return str(len(_BODIES) - 1)


def _body(word: str) -> Body:
    if not word.isdecimal() or int(word) >= len(_BODIES):
        raise ValueError(f"token_slices: body is {word!r}, wanted one of the {len(_BODIES)} that were made")
    return _BODIES[int(word)]


def slices_of(rows: int, slices: int) -> Iterator[slice]:
    """No slice has one row: a trace is of two or more."""
    if slices < 0:
        raise ValueError(f"token_slices: slices is {slices}, wanted 0 or more")
    size = max(2, -(-rows // slices)) if slices else SLICE
    begin = 0
    while begin < rows:
        end = begin + size if rows - begin > size + 1 else rows
        yield slice(begin, end)
        begin = end


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _given(seed: torch.Tensor | None, *lists: Sequence[Any]) -> list[Any]:
    return [*([] if seed is None else [seed]), *(one for given in lists for one in given)]


def forward_slices(body, x, seed, trained, frozen, streams, slices):  # type: ignore[no-untyped-def]
    _check(x)
    forward, given = _body(body).forward, _given(seed, trained, frozen, streams)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, out = _rows(x), _rows(y)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # casts are in the body
        for part in slices_of(rows.shape[0], slices):
            out[part] = forward(rows[part][None], *given, part.start)[0][0]
    return y


def backward_slices(body, x, seed, trained, frozen, streams, slices, dy):  # type: ignore[no-untyped-def]
    _check(x)
    made, given = _body(body), _given(seed, trained, frozen, streams)
    if made.backward is None:
        raise RuntimeError("token_slices: the forward was told that no gradient is wanted")
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, out, gradient = _rows(x), _rows(dx), _rows(dy)
    sums: list[torch.Tensor | None] = [None] * made.sums
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for part in slices_of(rows.shape[0], slices):
            own = (rows[part][None], *given, gradient[part][None], part.start)
            found, *sums = made.backward(*own, *sums)
            out[part] = found[0]
            del found
        if rows.shape[0] == 0:
            return [dx, *(torch.zeros_like(t) for t in trained)]
        return [dx, *made.finish(*trained, *frozen, *sums)]


torch.library.impl("monograph::token_slices", "CompositeExplicitAutograd")(forward_slices)
torch.library.impl("monograph::token_slices_backward", "CompositeExplicitAutograd")(backward_slices)


def _check(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise NotImplementedError(f"token_slices: x is on {x.device}, wanted cpu")


@torch.library.register_fake("monograph::token_slices")
def _(body, x, seed, trained, frozen, streams, slices):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("monograph::token_slices_backward")
def _(body, x, seed, trained, frozen, streams, slices, dy):  # type: ignore[no-untyped-def]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *trained)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.body, x, seed, trained, frozen, ctx.streams, ctx.slices = inputs
    ctx.counts = (seed is not None, len(trained))
    ctx.save_for_backward(x, *_given(seed, trained, frozen))


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    seeded, count = ctx.counts
    seed = rest.pop(0) if seeded else None
    trained, frozen = rest[:count], rest[count:]
    dx, *found = torch.ops.monograph.token_slices_backward(
        ctx.body, x, seed, trained, frozen, ctx.streams, ctx.slices, dy
    )
    no_streams: list[Any] | None = None if ctx.streams else []  # an empty list counts as one of tensors
    return None, dx, None, list(found), [None] * len(frozen), no_streams, None


register_autograd("token_slices", _backward, _setup_context)
register_not_differentiable("token_slices_backward")
