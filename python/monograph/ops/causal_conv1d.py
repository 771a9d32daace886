"""monograph::causal_conv1d: the short convolution of recurrent layers, over documents packed in one row.

    y[t] = act(bias + sum over j of weight[:, j] x[t - W + 1 + j])     act: silu or none

x [tokens, channels] may lie in memory as it likes, also with tokens innermost. Document n owns the tokens
[cu[n], cu[n + 1]); before its first token stand the W - 1 inputs of state[n] (the newest last), or zeros.
final_state is the same after its last token. Tokens outside every document give 0 and take no part. Sums are
float32 in the order of j, the bias first, rounded once. Nothing is saved but the inputs. A second derivative
raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (the schemas are registered there)
from monograph.ops.argument_checks import (
    check_float,
    check_optional_tensors,
    check_shape,
    check_tensors,
    dtype_name,
    require,
)
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.documents import check_offsets, document_of
from monograph.ops.providers import serve

MOST_TAPS = 8


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    silu: bool = True,
    keep_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [tokens, channels] and the final state [documents, channels, W - 1]; without keep_state of none.

    `weight` [channels, W] with W from 1 to 8 and `bias` [channels] are in the dtype of x or float32.
    """
    y, final_state = torch.ops.monograph.causal_conv1d(x, weight, bias, cu, state, silu, keep_state)
    return y, final_state


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check_parameter(op: str, what: str, parameter: torch.Tensor, x: torch.Tensor) -> None:
    check_float(op, what, parameter)
    fits = parameter.dtype in (x.dtype, _wide(x.dtype))
    found, wanted = dtype_name(parameter.dtype), dtype_name(x.dtype)
    require(fits, op, f"{what} is {found}, wanted {wanted} as x, or float32")


def check_arguments(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None,
) -> None:
    check_tensors(op, x=x, weight=weight, cu=cu)
    check_optional_tensors(op, x, bias=bias, state=state)
    check_float(op, "x", x)
    require(x.dim() == 2, op, f"x has {x.dim()} dimensions, wanted [tokens, channels]")
    channels = x.shape[1]
    require(channels > 0, op, "x has 0 channels, wanted 1 or more")
    _check_parameter(op, "weight", weight, x)
    require(weight.dim() == 2, op, f"weight has {weight.dim()} dimensions, wanted [channels, taps]")
    taps = weight.shape[1]
    require(1 <= taps <= MOST_TAPS, op, f"weight has {taps} taps, wanted 1 to {MOST_TAPS}")
    check_shape(op, "weight", weight, [channels, taps])
    if bias is not None:
        _check_parameter(op, "bias", bias, x)
        check_shape(op, "bias", bias, [channels])
    require(cu.numel() >= 1, op, "cu is empty, wanted at least one offset")
    check_offsets(op, "cu", cu, x.shape[0])
    if state is not None:
        check_float(op, "state", state, x.dtype)
        check_shape(op, "state", state, [cu.numel() - 1, channels, taps - 1])


class _Places:
    """Where the inputs of a token, and of a final state, stand: in x, in the state, or nowhere."""

    def __init__(self, cu: torch.Tensor, tokens: int, taps: int) -> None:
        self.count, self.tokens, self.past = cu.numel() - 1, tokens, taps - 1
        document = document_of(cu, tokens)
        self.inside = (document >= 0) & (document < self.count)
        self.document = document.clamp(0, max(self.count - 1, 0))
        self.begin = cu.to(torch.int64)
        self.positions = torch.arange(tokens, device=cu.device)

    def of_tokens(self, back: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`back` tokens before each: its place in x, whether it is there, and how far behind the document's
        first token it stands (negative: in the state)."""
        place = self.positions - back
        behind = place - self.begin[self.document]
        return place.clamp(min=0), self.inside & (behind >= 0), behind

    def of_state(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for entry i of each document's final state."""
        place = self.begin[1:] - self.past + i
        behind = place - self.begin[:-1]
        return place.clamp(0, max(self.tokens - 1, 0)), behind >= 0, behind


def _tap(
    places: _Places, x: torch.Tensor, state: torch.Tensor | None, back: int, wide: torch.dtype
) -> torch.Tensor:
    """The input `back` tokens before each token; 0 where there is none."""
    place, there, behind = places.of_tokens(back)
    value = torch.where(there[:, None], x[place].to(wide), 0.0)
    if state is not None and places.count > 0 and places.past > 0:
        entry = (places.past + behind).clamp(0, places.past - 1)
        before = places.inside & (behind < 0)
        value = torch.where(before[:, None], state[places.document, :, entry].to(wide), value)
    return value


def _sums(
    places: _Places,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
) -> torch.Tensor:
    """What the activation takes, in float32."""
    wide = _wide(x.dtype)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    if bias is not None:
        total = total + bias.to(wide)
    for j in range(weight.shape[1]):
        total = total + weight[:, j].to(wide) * _tap(places, x, state, weight.shape[1] - 1 - j, wide)
    return total


def portable_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    silu: bool,
    keep_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in aten operations, for any device."""
    check_arguments("causal_conv1d", x, weight, bias, cu, state)
    places = _Places(cu, x.shape[0], weight.shape[1])
    total = _sums(places, x, weight, bias, state)
    y = torch.nn.functional.silu(total) if silu else total
    y = torch.where(places.inside[:, None], y, 0.0).to(x.dtype).contiguous()
    final = x.new_zeros([places.count if keep_state else 0, x.shape[1], places.past])
    for i in range(places.past if keep_state and places.count > 0 else 0):
        place, there, behind = places.of_state(i)
        if places.tokens > 0:
            final[:, :, i] = torch.where(there[:, None], x[place], 0.0)
        if state is not None:
            before = state.gather(
                2, (places.past + behind).clamp(0, places.past - 1)[:, None, None].expand(-1, x.shape[1], 1)
            )
            final[:, :, i] = torch.where(there[:, None], final[:, :, i], before[:, :, 0])
    return y, final


def portable_causal_conv1d_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    silu: bool,
    need: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in aten operations: of x, weight, bias (both float32), state; empty where not needed."""
    op = "causal_conv1d_backward"
    check_tensors(op, x=x, dy=dy)
    check_optional_tensors(op, x, dfinal=dfinal)
    check_arguments(op, x, weight, bias, cu, state)
    check_float(op, "dy", dy, x.dtype)
    check_shape(op, "dy", dy, x.shape)
    taps, wide = weight.shape[1], _wide(x.dtype)
    if dfinal is not None:
        check_float(op, "dfinal", dfinal, x.dtype)
        check_shape(op, "dfinal", dfinal, [cu.numel() - 1, x.shape[1], taps - 1])
    _check_need(op, need)
    places = _Places(cu, x.shape[0], taps)
    d = dy.to(wide)
    if silu:
        total = _sums(places, x, weight, bias, state)
        s = torch.sigmoid(total)
        d = d * (s + total * s * (1 - s))
    d = torch.where(places.inside[:, None], d, 0.0)
    none = x.new_empty(0)
    dweight = none.to(wide)
    if need[1]:
        products = [(d * _tap(places, x, state, taps - 1 - j, wide)).sum(0) for j in range(taps)]
        dweight = torch.stack(products, dim=1)
    dbias = d.sum(0) if need[2] and bias is not None else none.to(wide)
    dx, dstate = torch.zeros(x.shape, dtype=wide, device=x.device), None
    shape = [places.count, x.shape[1], places.past]
    dstate = torch.zeros(shape, dtype=wide, device=x.device)
    for j in range(taps):
        place, there, behind = places.of_tokens(taps - 1 - j)
        part = weight[:, j].to(wide) * d
        dx.index_add_(0, place[there], part[there])
        _add_to_state(places, dstate, places.document, behind, places.inside & ~there, part)
    for i in range(places.past if dfinal is not None else 0):
        place, there, behind = places.of_state(i)
        part = dfinal[:, :, i].to(wide)  # type: ignore[index]
        dx.index_add_(0, place[there], part[there])
        _add_to_state(places, dstate, torch.arange(places.count, device=x.device), behind, ~there, part)
    return (
        dx.to(x.dtype) if need[0] else none,
        dweight,
        dbias,
        dstate.to(x.dtype) if need[3] and state is not None else none,
    )


def _add_to_state(
    places: _Places,
    dstate: torch.Tensor,
    document: torch.Tensor,
    behind: torch.Tensor,
    where: torch.Tensor,
    part: torch.Tensor,
) -> None:
    """Adds the rows of `part` that came from the state to the entry they came from."""
    if places.past == 0 or places.count == 0:
        return
    rows = document[where] * places.past + places.past + behind[where]
    flat = torch.zeros(
        [places.count * places.past, part.shape[1]], dtype=part.dtype, device=part.device
    ).index_add_(0, rows, part[where])
    dstate += flat.reshape(places.count, places.past, -1).transpose(1, 2)


def _check_need(op: str, need: Sequence[bool]) -> None:
    require(len(need) == 4, op, f"need has {len(need)} entries, wanted 4")


def _check_kinds(op: str, x: torch.Tensor, weight: torch.Tensor, cu: torch.Tensor) -> None:
    require(x.dim() == 2, op, f"x has {x.dim()} dimensions, wanted [tokens, channels]")
    require(weight.dim() == 2, op, f"weight has {weight.dim()} dimensions, wanted [channels, taps]")
    require(cu.dim() == 1, op, f"cu has {cu.dim()} dimensions, wanted one")


@torch.library.register_fake("monograph::causal_conv1d")
def _(x, weight, bias, cu, state, silu, keep_state):  # type: ignore[no-untyped-def]
    op = "causal_conv1d"
    check_tensors(op, x=x, weight=weight, cu=cu)
    check_optional_tensors(op, x, bias=bias, state=state)
    _check_kinds(op, x, weight, cu)
    if bias is not None:
        check_shape(op, "bias", bias, [x.shape[1]])
    if state is not None:
        check_shape(op, "state", state, [cu.shape[0] - 1, x.shape[1], weight.shape[1] - 1])
    documents = cu.shape[0] - 1 if keep_state else 0
    return x.new_empty(list(x.shape)), x.new_empty([documents, x.shape[1], weight.shape[1] - 1])


@torch.library.register_fake("monograph::causal_conv1d_backward")
def _(dy, dfinal, x, weight, bias, cu, state, silu, need):  # type: ignore[no-untyped-def]
    op = "causal_conv1d_backward"
    check_tensors(op, x=x, dy=dy, weight=weight, cu=cu)
    check_optional_tensors(op, x, dfinal=dfinal, bias=bias, state=state)
    _check_kinds(op, x, weight, cu)
    _check_need(op, need)
    wide = _wide(x.dtype)
    return (
        x.new_empty(list(x.shape) if need[0] else [0]),
        x.new_empty(list(weight.shape) if need[1] else [0], dtype=wide),
        x.new_empty([x.shape[1] if need[2] and bias is not None else 0], dtype=wide),
        x.new_empty(list(state.shape) if need[3] and state is not None else [0]),
    )


torch.library.impl("monograph::causal_conv1d", "CompositeExplicitAutograd")(
    serve("causal_conv1d", portable_causal_conv1d)
)
torch.library.impl("monograph::causal_conv1d_backward", "CompositeExplicitAutograd")(
    serve("causal_conv1d_backward", portable_causal_conv1d_backward)
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, bias, cu, state, ctx.silu, ctx.keep_state = inputs
    ctx.save_for_backward(x, weight, bias, cu, state)
    if not ctx.keep_state:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: torch.Tensor, dfinal: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias, cu, state = ctx.saved_tensors
    needs = ctx.needs_input_grad
    need = [needs[0], needs[1], needs[2], needs[4]]
    dx, dweight, dbias, dstate = torch.ops.monograph.causal_conv1d_backward(
        dy, dfinal if ctx.keep_state else None, x, weight, bias, cu, state, ctx.silu, need
    )
    return (
        dx if needs[0] else None,
        dweight.to(weight.dtype) if needs[1] else None,
        dbias.to(bias.dtype) if needs[2] else None,
        None,
        dstate if needs[4] else None,
        None,
        None,
    )


register_autograd("causal_conv1d", _backward, _setup_context)
register_not_differentiable("causal_conv1d_backward")


def _parameter(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.dtype == torch.float32 else cast(t)


@autocast_rule("causal_conv1d")
def _autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu: torch.Tensor,
    state: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch treats its own convolutions; a weight in float32 is taken as it is."""
    with without_autocast(x):
        return torch.ops.monograph.causal_conv1d(
            cast(x), _parameter(weight), _parameter(bias), cu, cast(state), *options
        )


@register_flop_formula(torch.ops.monograph.causal_conv1d)
def _flops(x, weight, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    return 2 * x[0] * x[1] * weight[1]


@register_flop_formula(torch.ops.monograph.causal_conv1d_backward)
def _backward_flops(dy, dfinal, x, weight, *rest, out_shape=None, **_):  # type: ignore[no-untyped-def]
    """Of dx and dweight; the sums under the activation are made again."""
    return 4 * x[0] * x[1] * weight[1]
