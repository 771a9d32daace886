"""monograph::ep_experts and its gradient: a layer of experts that are spread over ranks, as one operator.

It is `experts` for x of this rank, with the same bits, whatever the number of ranks is. The packed stacks and
the biases are those of this rank's experts, and `count` is the number of all of them. Factors are those of
all experts, [r E, in] and [out, r E], if each rank has the whole adapter; their gradient is that of this
rank's micro-batch. Or they are those of this rank's experts alone, once for each of the n ranks: [n, r e, in]
and [n, out, r e], n times the same values (`expand` takes no memory). Then row s of their gradient is that of
rank s's micro-batch, and none of it is sent.

`group` is a number that `register_group` gave: what exchanges rows with the other ranks. Shapes outside are
static; how many rows go where is known inside alone. A call is a collective of the group, forward and
backward, also for a rank without tokens, and for one whose arguments are refused: then every rank raises. The
fakes never communicate. Biases and the stacks have no gradient here; a slot whose id is outside [0, count) is
skipped, as by `experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.flop_counter import register_flop_formula

from monograph.ops import library  # noqa: F401  (creates the namespace)
from monograph.ops.argument_checks import (
    check_float,
    check_shape,
    check_tensors,
    dtype_name,
    require,
)
from monograph.ops.autocast import autocast_rule, cast, without_autocast
from monograph.ops.autograd import register_autograd, register_not_differentiable
from monograph.ops.experts_arguments import Activation, check_experts, check_fake, flat_layer
from monograph.ops.experts_arguments import ExpertsArguments as Arguments

_ARGUMENTS = (
    "Tensor x, Tensor ids, Tensor weights, Tensor values1, Tensor[] scales1, SymInt[] layout1, "
    "Tensor? bias1, Tensor values2, Tensor[] scales2, SymInt[] layout2, Tensor? bias2, Tensor? a1, "
    "Tensor? b1, Tensor? a2, Tensor? b2, float lora_scale1, float lora_scale2, int activation, "
    "bool interleaved, float alpha, float limit, bool transposed, int count, int group"
)
NEED = 4  # x, weights, (a1, b1), (a2, b2)


class Served(NamedTuple):
    """What a group is given: the arguments of `experts` with this rank's stacks."""

    given: Arguments
    experts: int  # of all ranks

    def factors(self) -> tuple[torch.Tensor | None, ...]:
        return self.given.a1, self.given.b1, self.given.a2, self.given.b2

    @property
    def cut(self) -> bool:
        """Whether factors are those of this rank's experts alone."""
        return any(t is not None and t.dim() == 3 for t in self.factors())


class Group(Protocol):
    """What exchanges rows. All but `held` are collectives."""

    @property
    def size(self) -> int: ...

    def held(self, count: int) -> int:
        """How many of `count` experts are here."""
        ...

    def refusing(self) -> AbstractContextManager[None]:
        """An error inside is told to the other ranks, which raise too."""
        ...

    def forward(self, served: Served) -> torch.Tensor: ...

    def backward(self, dy: torch.Tensor, served: Served, need: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """dx, dweights, da1, db1, da2, db2; empty where nothing is needed."""
        ...


_GROUPS: list[Group] = []


def register_group(group: Group) -> int:
    """The number by which the operator finds it: of this process, never given twice."""
    _GROUPS.append(group)
    return len(_GROUPS) - 1


def group_numbered(op: str, number: int) -> Group:
    known = 0 <= number < len(_GROUPS)
    require(known, op, f"group is {number}, wanted one that monograph.expert_parallel has made here")
    return _GROUPS[number]


def ep_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int]],
    second: tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int]],
    *,
    count: int,
    group: int,
    bias: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    lora1: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    lora2: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    activation: Activation = Activation.SILU,
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    transposed: bool = False,
) -> torch.Tensor:
    """y [T, H] in the dtype of x: `experts` with this rank's stacks; a, b: see the module's first lines."""
    layer = flat_layer(first, second, bias, lora1, lora2)
    numbers = (int(activation), interleaved, float(alpha), float(limit), transposed, count, group)
    return torch.ops.monograph.ep_experts(x, ids, weights, *layer, *numbers)


def _served(arguments: Sequence[Any]) -> tuple[Served, int]:
    *given, count, group = arguments
    return Served(Arguments(*given), count), group


def _check(op: str, served: Served, group: Group, **more: torch.Tensor) -> None:
    """All that `experts` would say, before anything is sent."""
    given, count = served
    without = given._replace(a1=None, b1=None, a2=None, b2=None)
    own, rows, hidden = check_experts(op, without, **more)
    held = group.held(count) if count > 0 else 0
    there = f"count is {count}, of which {held} are here, and the stacks have {own} experts"
    require(own == held, op, f"{there}; wanted as many")
    inner = given.shapes(op)[1][1 if given.transposed else 2]
    _check_factors(op, "1", given.a1, given.b1, given.x, served, group, (rows, hidden))
    _check_factors(op, "2", given.a2, given.b2, given.x, served, group, (hidden, inner))


def _check_factors(
    op: str,
    name: str,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    x: torch.Tensor,
    served: Served,
    group: Group,
    sizes: tuple[int, int],
) -> None:
    require((a is None) == (b is None), op, f"a{name} and b{name} must come together")
    if a is None or b is None:
        return
    check_tensors(op, x=x, **{f"a{name}": a, f"b{name}": b})
    check_float(op, f"a{name}", a)
    check_float(op, f"b{name}", b)
    dim = 3 if served.cut else 2
    require(a.dim() == dim, op, f"a{name} has {a.dim()} dimensions, wanted {dim}")
    count = group.held(served.experts) if served.cut else served.experts
    lead = [group.size] if served.cut else []
    ranks = a.shape[-2] // count * count
    check_shape(op, f"a{name}", a, [*lead, ranks, sizes[1]])
    check_shape(op, f"b{name}", b, [*lead, sizes[0], ranks])


torch.library.define("monograph::ep_experts", f"({_ARGUMENTS}) -> Tensor")
torch.library.define(
    "monograph::ep_experts_backward",
    f"(Tensor dy, {_ARGUMENTS}, bool[] need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("monograph::ep_experts", "CompositeExplicitAutograd")
def _ep_experts(*arguments: Any) -> torch.Tensor:
    served, number = _served(arguments)
    group = group_numbered("ep_experts", number)
    with group.refusing():
        _check("ep_experts", served, group)
    return group.forward(served)


@torch.library.impl("monograph::ep_experts_backward", "CompositeExplicitAutograd")
def _ep_experts_backward(dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    op = "ep_experts_backward"
    *rest, need = arguments
    served, number = _served(rest)
    group = group_numbered(op, number)
    with group.refusing():
        _check(op, served, group, dy=dy)
        x = served.given.x
        require(dy.dtype == x.dtype, op, f"dy has dtype {dtype_name(dy.dtype)}, wanted {dtype_name(x.dtype)}")
        check_shape(op, "dy", dy, list(x.shape))
        require(len(need) == NEED, op, f"need has {len(need)} entries, wanted {NEED}")
    return group.backward(dy.contiguous(), served, need)


# torch runs the fakes for a mixture with meta, too.


@torch.library.register_fake("monograph::ep_experts")
def _(*arguments):  # type: ignore[no-untyped-def]
    served, _ = _served(arguments)
    check_fake("ep_experts", served.given)
    return served.given.x.new_empty(list(served.given.x.shape))


@torch.library.register_fake("monograph::ep_experts_backward")
def _(dy, *arguments):  # type: ignore[no-untyped-def]
    *rest, need = arguments
    served, _ = _served(rest)
    check_fake("ep_experts_backward", served.given, dy=dy)
    x = served.given.x
    return tuple(x.new_empty(0) if t is None else t.new_empty(list(t.shape)) for t in wanted(served, need))


def wanted(served: Served, need: Sequence[bool]) -> list[torch.Tensor | None]:
    """For each output of backward what it is the gradient of; None where it stays empty."""
    given = served.given
    single = (given.x, given.weights)
    flags = (need[0], need[1], need[2], need[2], need[3], need[3])
    return [t if flag else None for t, flag in zip((*single, *served.factors()), flags, strict=True)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    served, ctx.group = _served(inputs)
    given, ctx.count = served
    tensors = (given.x, given.ids, given.weights, given.bias1, given.bias2, *served.factors())
    ctx.save_for_backward(*tensors, given.values1, given.values2, *given.scales1, *given.scales2)
    ctx.scales = len(given.scales1), len(given.scales2)
    ctx.layouts = given.layout1, given.layout2
    ctx.numbers = given[15:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    x, ids, weights, bias1, bias2, a1, b1, a2, b2, values1, values2, *scales = ctx.saved_tensors
    layout1, layout2 = ctx.layouts
    first = (values1, scales[: ctx.scales[0]], layout1, bias1)
    second = (values2, scales[ctx.scales[0] :], layout2, bias2)
    given = Arguments(x, ids, weights, *first, *second, a1, b1, a2, b2, *ctx.numbers)
    needs = ctx.needs_input_grad
    for name, place in (("values1", 3), ("bias1", 6), ("values2", 7), ("bias2", 10)):
        if needs[place]:
            with group_numbered("ep_experts", ctx.group).refusing():
                raise RuntimeError(
                    f"ep_experts: {name} is trained, and experts that are spread over ranks are frozen but "
                    "for their LoRA factors; wanted requires_grad False"
                )
    flags = [needs[0], needs[2], needs[11] or needs[12], needs[13] or needs[14]]
    served = Served(given, ctx.count)
    found: list[torch.Tensor | None] = [None] * 6
    if any(flags):
        # Also for a gradient of nothing: the other ranks wait for this one.
        dy = torch.zeros_like(x) if dy is None else dy
        made = torch.ops.monograph.ep_experts_backward(dy, *given, ctx.count, ctx.group, flags)
        found = [t if like is not None else None for t, like in zip(made, wanted(served, flags), strict=True)]
    dx, dweights, *low = found
    none1, none2 = ([None] * count for count in ctx.scales)
    return dx, None, dweights, None, none1, None, None, None, none2, None, None, *low, *[None] * 9


register_autograd("ep_experts", _backward, _setup_context)
register_not_differentiable("ep_experts_backward")


@autocast_rule("ep_experts")
def _autocast(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *rest: Any) -> Any:
    """As that of `experts`."""
    x = cast(x)
    weights = weights if weights.dtype in (x.dtype, torch.float64) else weights.float()
    with without_autocast(x):
        return torch.ops.monograph.ep_experts(x, ids, weights, *rest)


def _products(arguments: Sequence[Any]) -> tuple[int, int, int]:
    """As of `experts`, of all slots of this rank's tokens: with even routes a rank computes as many for all.
    Shapes stand for tensors."""
    served, _ = _served(arguments)
    given, count = served
    tokens, chosen = (int(size) for size in given.ids)
    slots = tokens * chosen
    (held, rows, cols), (_, hidden, inner) = given.shapes("ep_experts")
    low = 0
    for a, sizes in ((given.a1, rows + cols), (given.a2, hidden + inner)):
        if a is not None:
            low += slots * sizes * (int(a[-2]) // (held if len(a) == 3 else count))
    return slots * rows * cols, slots * hidden * inner, low


@register_flop_formula(torch.ops.monograph.ep_experts)
def _flops(*arguments, out_shape=None, **_):  # type: ignore[no-untyped-def]
    return 2 * sum(_products(arguments))


@register_flop_formula(torch.ops.monograph.ep_experts_backward)
def _backward_flops(dy, *arguments, out_shape=None, **_):  # type: ignore[no-untyped-def]
    first, second, low = _products(arguments[:-1])
    return 2 * (2 * first + second + 3 * low)
