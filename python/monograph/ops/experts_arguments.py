"""The arguments of `monograph::experts` and its gradients: one tuple, what they mean, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import isfinite
from typing import Any, NamedTuple

import torch

from monograph.ops.argument_checks import (
    check_dimensions,
    check_float,
    check_number,
    check_packed,
    check_shape,
    check_tensors,
    dtype_name,
    require,
)
from monograph.ops.formats import BlockShape, format_numbered
from monograph.ops.layout import PLAIN, Layout, pair_layout, read_layout, split_pair


class Activation(IntEnum):
    """What stands between the two products. The first four have a gate."""

    SILU = 0  # silu(gate) * up
    CLAMPED_SILU = 1  # silu(min(gate, limit)) * clamp(up, -limit, limit): DeepSeek-V4
    GPT_OSS = 2  # g = min(gate, limit), u = clamp(up, -limit, limit): (u + 1) * g * sigmoid(alpha g)
    GELU_TANH = 3  # gelu_tanh(gate) * up
    RELU_SQUARED = 4  # relu(up)^2, without a gate: Nemotron-H
    UNGATED_SILU = 5  # silu(up), without a gate

    @property
    def gated(self) -> bool:
        return self <= Activation.GELU_TANH


class Stack(NamedTuple):
    """The matrices of all experts, [E, rows, cols]."""

    values: torch.Tensor
    scales: Sequence[torch.Tensor]
    layout: Layout


class ExpertsArguments(NamedTuple):
    """From `x` to `transposed`, in the order of the schema."""

    x: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, k] int64; an expert outside [0, E) is skipped
    weights: torch.Tensor  # [T, k], in the dtype of x or float32
    values1: (
        torch.Tensor
    )  # the weight of gate and up, [E, 2I, H]; without a gate, or of gate alone, [E, I, H]
    scales1: Sequence[torch.Tensor]  # with two stacks: gate's, the values of up, and its scales
    layout1: Sequence[int]  # with two stacks: ops/layout.py, pair_layout
    bias1: torch.Tensor | None  # [E, 2I]
    values2: torch.Tensor  # the weight of down, [E, H, I]
    scales2: Sequence[torch.Tensor]
    layout2: Sequence[int]
    bias2: torch.Tensor | None  # [E, H]
    a1: torch.Tensor | None  # [r E, H], rows e r .. (e + 1) r of expert e
    b1: torch.Tensor | None  # [2I, r E], column j E + e is rank j of expert e
    a2: torch.Tensor | None  # [r E, I]
    b2: torch.Tensor | None  # [H, r E]
    lora_scale1: float
    lora_scale2: float
    activation: int
    interleaved: bool  # columns 2i are gate and 2i + 1 up; else gate is the first half; of two stacks too
    alpha: float
    limit: float
    transposed: bool  # plain weights only: values1 is [E, H, 2I] and values2 [E, I, H]

    @property
    def slots(self) -> int:
        return self.ids.shape[0] * self.ids.shape[1]

    def shapes(self, op: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """[E, out, in] of the two weights as the layouts say; with `transposed` they hold [E, in, out]."""
        found = []
        for name, numbers in (("layout1", self.layout1), ("layout2", self.layout2)):
            pair = split_pair(op, numbers) if name == "layout1" else None
            shape = read_layout(op, numbers if pair is None else pair[0]).shape
            require(len(shape) == 3, op, f"{name} has {len(shape)} dimensions, wanted 3")
            found.append(shape if pair is None else (shape[0], 2 * shape[1], shape[2]))
        return found[0], found[1]

    def first_stacks(self, op: str) -> list[Stack]:
        """The weight of gate and up: one stack, or gate and then up."""
        pair = split_pair(op, self.layout1)
        if pair is None:
            return [Stack(self.values1, self.scales1, read_layout(op, self.layout1))]
        gate, count, up = pair
        found = f"layout1 claims {count} scales of gate, scales1 has {len(self.scales1)} tensors"
        there = 0 <= count < len(self.scales1)
        require(there, op, f"{found}, wanted those and the values of up behind")
        own, (values, *others) = self.scales1[:count], self.scales1[count:]
        return [
            Stack(self.values1, own, read_layout(op, gate)),
            Stack(values, others, read_layout(op, up)),
        ]

    def second_stack(self, op: str) -> Stack:
        return Stack(self.values2, self.scales2, read_layout(op, self.layout2))


Weight = tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[int]]


def two_stacks(gate: Weight, up: Weight) -> Weight:
    """The weight of gate and up out of two packed stacks [E, I, H], which stay where they are."""
    (values, scales, layout), (others, behind, other) = gate, up
    return values, [*scales, others, *behind], pair_layout(layout, len(scales), other)


def flat_layer(
    first: Weight,
    second: Weight,
    bias: tuple[torch.Tensor | None, torch.Tensor | None],
    lora1: tuple[torch.Tensor, torch.Tensor, float] | None,
    lora2: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> tuple[Any, ...]:
    """From `values1` to `lora_scale2`: a weight is (values, scales, layout) and a LoRA (a, b, scale)."""
    a1, b1, scale1 = lora1 or (None, None, 0.0)
    a2, b2, scale2 = lora2 or (None, None, 0.0)
    weight1, weight2 = ((values, list(scales), list(layout)) for values, scales, layout in (first, second))
    return *weight1, bias[0], *weight2, bias[1], a1, b1, a2, b2, float(scale1), float(scale2)


def check_fake(op: str, given: ExpertsArguments, **more: torch.Tensor) -> None:
    """What a fake may look at: kinds, devices and numbers of dimensions, no sizes."""
    optional = {name: getattr(given, name) for name in ("bias1", "bias2", "a1", "b1", "a2", "b2")}
    check_tensors(
        op,
        x=given.x,
        ids=given.ids,
        weights=given.weights,
        values1=given.values1,
        scales1=given.scales1,
        values2=given.values2,
        scales2=given.scales2,
        **{name: t for name, t in optional.items() if t is not None},
        **more,
    )
    for name, t in (("x", given.x), ("ids", given.ids), ("weights", given.weights)):
        require(t.dim() == 2, op, f"{name} has {t.dim()} dimensions, wanted 2")


def _check_stack(op: str, which: str, stack: Stack, transposed: bool) -> None:
    values, scales, layout = stack
    if layout.format == PLAIN:
        cut = layout.block or layout.origin or layout.grid_rows or scales
        require(not cut, op, f"layout{which} of a plain weight has a block, an origin, grids or scales")
        check_float(op, f"values{which}", values)
        check_dimensions(op, layout.shape)
        fits = values.numel() == torch.Size(layout.shape).numel()
        found = f"values{which} has {values.numel()} elements"
        require(fits, op, f"{found}, layout{which} says {list(layout.shape)}")
        return
    require(not transposed, op, "transposed is True for a packed weight, wanted a plain one")
    check_packed(op, values, scales, layout)
    flat = format_numbered(layout.format).shape is BlockShape.FLAT
    found = f"layout{which} has the origin {layout.origin}"
    require(not layout.origin or flat, op, f"{found}, wanted 0 where blocks begin anew with each expert")


def _check_first(op: str, given: ExpertsArguments) -> Layout:
    """The layout of gate and up, or of gate."""
    stacks = given.first_stacks(op)
    if len(stacks) == 2:
        kind = Activation(given.activation)
        require(kind.gated, op, f"layout1 has two stacks, {kind.name.lower()} has no gate")
        gate, up = (list(stack.layout.shape) for stack in stacks)
        require(gate == up, op, f"gate is {gate}, up is {up}, wanted both alike")
        packed = all(stack.layout.format != PLAIN for stack in stacks)
        require(packed, op, "gate and up are two stacks and one is plain, wanted two packed ones")
        one, other = (format_numbered(stack.layout.format) for stack in stacks)
        alternate = one is other and one.shape is BlockShape.INTERLEAVED
        found = f"interleaved is True for two stacks: rows of {one.name} and of {other.name} cannot alternate"
        wanted = f"{found}, wanted one format of ggml's blocks"
        require(alternate or not given.interleaved, op, wanted)
    for stack in stacks:
        _check_stack(op, "1", stack, given.transposed)
    return stacks[0].layout


def _check_low_rank(
    op: str, which: str, a: torch.Tensor | None, b: torch.Tensor | None, shape: Sequence[int]
) -> None:
    require((a is None) == (b is None), op, f"a{which} and b{which} must come together")
    if a is None or b is None:
        return
    experts, rows, cols = shape
    check_float(op, f"a{which}", a)
    check_float(op, f"b{which}", b)
    whole = a.dim() == 2 and experts > 0 and a.shape[0] % experts == 0
    found = f"a{which} has shape {list(a.shape)}"
    require(whole, op, f"{found}, wanted [rank * {experts}, {cols}]")
    check_shape(op, f"a{which}", a, [a.shape[0], cols])
    check_shape(op, f"b{which}", b, [rows, a.shape[0]])


def check_experts(op: str, given: ExpertsArguments, **more: torch.Tensor) -> tuple[int, int, int]:
    """All of it. Returns the numbers of experts, of rows of the first weight, and of hidden columns."""
    check_fake(op, given, **more)
    known = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in Activation)
    inside = 0 <= given.activation <= max(Activation)
    require(inside, op, f"activation is {given.activation}, wanted one of {known}")
    kind = Activation(given.activation)
    require(kind.gated or not given.interleaved, op, f"interleaved is True, {kind.name.lower()} has no gate")
    if kind in (Activation.CLAMPED_SILU, Activation.GPT_OSS):
        check_number(op, "limit", given.limit, positive=True)
    require(isfinite(given.alpha), op, f"alpha is {given.alpha}, wanted a number")
    for name in ("lora_scale1", "lora_scale2"):
        require(isfinite(getattr(given, name)), op, f"{name} is {getattr(given, name)}, wanted a number")
    shape1, shape2 = given.shapes(op)
    first, second = _check_first(op, given), read_layout(op, given.layout2)
    _check_stack(op, "2", given.second_stack(op), given.transposed)
    same = (first.format == PLAIN) == (second.format == PLAIN)
    require(same or not given.transposed, op, "transposed is True, wanted two plain weights")
    if given.transposed:
        shape1, shape2 = ((e, rows, cols) for e, cols, rows in (shape1, shape2))
    experts, rows, hidden = shape1
    inner = rows // 2 if kind.gated else rows
    require(not kind.gated or rows % 2 == 0, op, f"gate and up have {rows} rows together, wanted two halves")
    wanted = [experts, hidden, inner]
    require(list(shape2) == wanted, op, f"the second weight is {list(shape2)}, wanted {wanted}")
    for name, layout, grids in (("layout1", first, (0, inner, rows)), ("layout2", second, (0, hidden))):
        found = f"{name} has grids of {layout.grid_rows} rows"
        require(layout.grid_rows in grids, op, f"{found}, wanted one of {grids}")
    check_float(op, "x", given.x)
    check_shape(op, "x", given.x, [given.x.shape[0], hidden])
    found = dtype_name(given.ids.dtype)
    require(given.ids.dtype == torch.int64, op, f"ids has dtype {found}, wanted int64")
    check_shape(op, "ids", given.ids, [given.x.shape[0], given.ids.shape[1]])
    check_float(op, "weights", given.weights)
    fits = given.weights.dtype in (given.x.dtype, torch.float32)
    found = dtype_name(given.weights.dtype)
    require(fits, op, f"weights has dtype {found}, wanted float32 or {dtype_name(given.x.dtype)} as x")
    check_shape(op, "weights", given.weights, list(given.ids.shape))
    for name, bias, size in (("bias1", given.bias1, rows), ("bias2", given.bias2, hidden)):
        if bias is not None:
            check_float(op, name, bias)
            check_shape(op, name, bias, [experts, size])
    _check_low_rank(op, "1", given.a1, given.b1, (experts, rows, hidden))
    _check_low_rank(op, "2", given.a2, given.b2, (experts, hidden, inner))
    return experts, rows, hidden


def check_gradient(
    op: str, dy: torch.Tensor, pre: torch.Tensor, given: ExpertsArguments
) -> tuple[int, int, int]:
    """The same for what takes dy and pre. `pre` may have no rows: then it is computed again."""
    found = check_experts(op, given, dy=dy, pre=pre)
    check_float(op, "dy", dy, given.x.dtype)
    check_shape(op, "dy", dy, list(given.x.shape))
    check_float(op, "pre", pre, given.x.dtype)
    rows = pre.shape[0] if pre.dim() == 2 and pre.shape[0] == 0 else given.slots
    check_shape(op, "pre", pre, [rows, found[1]])
    return found
