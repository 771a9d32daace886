"""Checks of arguments for fakes and portable implementations; for kernels ops/arguments/ checks the same.

An error names the operator, the thing, the value found and the value wanted. A fake checks counts, kinds and
devices only: sizes may be symbols there, and a comparison would become a guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod

import torch

from monograph.ops.formats import SCALE_GROUP, BlockShape, Format, ZeroPoints, format_numbered
from monograph.ops.layout import PLAIN, Layout, read_matrix
from monograph.upstream.torch_names import assert_async

IGNORED = -100  # the label of a token that does not count

Tensors = Sequence[torch.Tensor]
_OPTIONAL = ("bias", "u", "b", "a", "du", "key_lengths", "sinks", "sum")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MOST_ELEMENTS = 2**56  # as in core/monograph/formats/bind.h
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-149  # of float32's subnormals


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{op}: {message}")


def require_on_device(condition: torch.Tensor, op: str, message: str) -> None:
    """`require` for a bool tensor [] that no host waits for: the device raises when it gets there.

    A device that has no such assertion is waited for.
    """
    try:
        assert_async(condition, f"{op}: {message}")
    except NotImplementedError:
        require(bool(condition), op, message)


def check_tensors(op: str, **arguments: torch.Tensor | Tensors | None) -> None:
    """Ordinary strided tensors, all on the device of the first."""
    device = None
    for name, argument in arguments.items():
        if argument is None and name not in _OPTIONAL:
            raise ValueError(f"{op}: {name} is None, wanted a tensor")
        for t in [argument] if isinstance(argument, torch.Tensor) else argument or ():
            if t.layout is not torch.strided or t.is_quantized:
                kind = "quantised by torch" if t.is_quantized else str(t.layout).removeprefix("torch.")
                raise ValueError(f"{op}: {name} is {kind}, wanted an ordinary tensor")
            device = t.device if device is None else device
            if t.device != device:
                raise ValueError(f"{op}: {name} is on {t.device}, wanted {device} as the others")


def check_optional_tensors(op: str, first: torch.Tensor, **arguments: torch.Tensor | None) -> None:
    """check_tensors on what is given; all on the device of `first`."""
    check_tensors(op, activations=first, **{name: t for name, t in arguments.items() if t is not None})


def check_float(op: str, what: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    found = dtype_name(tensor.dtype)
    require(tensor.dtype in _FLOATS, op, f"{what} has dtype {found}, wanted bfloat16, float16 or float32")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{op}: {what} is {found}, wanted {dtype_name(dtype)} as the activations")


def check_rows(
    op: str,
    what: str,
    tensor: torch.Tensor,
    rows: int | None = None,
    cols: int | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """[..., cols] with this many rows and columns of this type; None is any."""
    check_float(op, what, tensor, dtype)
    require(tensor.dim() >= 1, op, f"{what} has no dimensions, wanted [..., cols]")
    found = prod(tensor.shape[:-1])
    require(rows is None or found == rows, op, f"{what} has {found} rows, wanted {rows}")
    require(
        cols is None or tensor.shape[-1] == cols, op, f"{what} has {tensor.shape[-1]} columns, wanted {cols}"
    )


def check_beside(op: str, what: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """The same as x, but for the last dimension."""
    check_rows(op, what, tensor, None, None, x.dtype)
    found, wanted = list(tensor.shape[:-1]), list(x.shape[:-1])
    require(found == wanted, op, f"{what} has leading dimensions {found}, wanted {wanted} as the activations")


def check_vector(op: str, what: str, tensor: torch.Tensor, size: int, dtype: torch.dtype) -> None:
    check_float(op, what, tensor, dtype)
    check_shape(op, what, tensor, [size])


def check_shape(op: str, what: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    found = list(tensor.shape)
    require(found == list(shape), op, f"{what} has shape {found}, wanted {list(shape)}")


def check_number(op: str, what: str, number: float, positive: bool = False, signed: bool = False) -> None:
    """What float32 holds; at least 0 or above it unless signed."""
    wanted = "more than 0" if positive else "0 or more"
    in_order = signed or (number > 0 if positive else number >= 0)
    require(in_order, op, f"{what} is {number}, wanted {wanted}")
    inside = number == 0 or (isfinite(number) and _SMALLEST <= abs(number) <= _LARGEST)
    require(inside, op, f"{what} is {number}, wanted a number in the range of float32")


def check_dimensions(op: str, shape: Sequence[int]) -> None:
    for size in shape:
        require(size >= 0, op, f"layout has the negative dimension {size}")
    small = prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS
    require(small, op, f"the shape {list(shape)} has too many elements, wanted at most 2^56")


def _check_origin(op: str, fmt: Format, layout: Layout) -> None:
    *matrices, _, cols = (1, *layout.shape)
    check_dimensions(op, layout.shape)
    check_dimensions(op, [layout.origin + prod(layout.shape)])
    if layout.origin and fmt.shape is not BlockShape.FLAT:
        whole = prod(matrices) == 1 and cols != 0 and layout.origin % cols == 0
        found = f"the origin is {layout.origin} in a weight of shape {list(layout.shape)}"
        require(whole, op, f"{found}, format {fmt.name} wants whole rows of one matrix")


def shared_scales(layout: Layout, scales: Tensors) -> dict[int, int]:
    """Which of the scales may be one number for all grids, and its bytes."""
    if len(scales) == 2 and format_numbered(layout.format).shape is not BlockShape.GROUP:
        return {1: 4}
    return {3: 4} if len(scales) == 4 else {}


def grids_of(
    op: str, values: torch.Tensor, scales: Tensors, layout: Layout
) -> list[tuple[torch.Tensor, Tensors, Layout]]:
    """(values, scales, layout) of each matrix that was quantised on its own; checks their number alone."""
    if layout.grid_rows == 0:
        return [(values, scales, layout)]
    check_dimensions(op, layout.shape)
    *lead, cols = layout.shape
    rows = prod(lead)
    found = f"a grid has {layout.grid_rows} rows"
    require(rows > 0 and rows % layout.grid_rows == 0, op, f"{found}, wanted a part of the weight's {rows}")
    count = rows // layout.grid_rows
    # All but the map are one behind the other; the offset or a tensor scale may be one for all.
    single = shared_scales(layout, scales)
    parts = [values.reshape(-1), *(s.reshape(-1) for s in scales)]
    for i, part in enumerate(parts):
        if i - 1 == 2 or part.numel() == single.get(i - 1):
            parts[i] = part.expand(count, -1)
            continue
        what = "values" if i == 0 else f"scales[{i - 1}]"
        require(
            part.numel() % count == 0,
            op,
            f"{what} has {part.numel()} bytes, wanted as many for each of the {count} grids",
        )
        parts[i] = part.reshape(count, -1)
    own = Layout(layout.format, layout.block, (layout.grid_rows, cols))
    return [(parts[0][i], [p[i] for p in parts[1:]], own) for i in range(count)]


def _check_groups(
    op: str, fmt: Format, values: torch.Tensor, scales: Tensors, shape: Sequence[int], groups: int
) -> None:
    matrices, rows = prod(shape[:-2]), prod(shape[-2:-1])
    require(matrices == 1, op, f"the weight has {matrices} matrices, format {fmt.name} wants one")
    wanted = fmt.value_bytes(shape)
    require(values.numel() == wanted, op, f"values has {values.numel()} bytes, wanted {wanted}")
    counts = (1,) if fmt.zero_points is ZeroPoints.NONE else (1, 2)
    found = f"scales has {len(scales)} tensors"
    require(len(scales) in counts, op, f"{found}, format {fmt.name} wants one of {counts}")
    size, each = scales[0].numel(), fmt.scale_bytes(None)
    one = size == each and groups != 1
    kind = fmt.scale_types[0]
    wanted = groups * each
    require(one or size == wanted, op, f"scales[0] ({kind}) has {size} bytes, wanted {wanted}")
    if len(scales) == 2:
        require(not one, op, f"scales[0] is one scale beside zero points, wanted {groups}")
        size, wanted = scales[1].numel(), fmt.zero_point_bytes(rows, groups // max(rows, 1))
        require(size == wanted, op, f"scales[1] (zero points) has {size} bytes, wanted {wanted}")


def _check_interleaved(
    op: str, fmt: Format, values: torch.Tensor, scales: Tensors, shape: Sequence[int]
) -> None:
    matrices, rows, size = prod(shape[:-2]), prod(shape[-2:-1]), values.numel()
    require(matrices == 1, op, f"the weight has {matrices} matrices, format {fmt.name} wants one")
    found = f"scales has {len(scales)} tensors"
    require(len(scales) < 2, op, f"{found}, format {fmt.name} wants none, or 1 (row map)")
    wanted, each = fmt.value_bytes(shape), fmt.row_bytes(shape[-1])
    if not scales or each == 0:
        require(size == wanted, op, f"values has {size} bytes, wanted {wanted}")
    else:
        require(size % each == 0, op, f"values has {size} bytes, wanted rows of {each}")
    if scales:
        found = f"scales[0] (row map) has {scales[0].numel()} bytes"
        require(scales[0].numel() == 4 * rows, op, f"{found}, wanted {4 * rows}")


def check_packed(op: str, values: torch.Tensor, scales: Tensors, layout: Layout) -> None:
    """The sizes that a format wants; `values` and `scales` may lie in memory as they like."""
    if layout.grid_rows:
        try:
            fmt = format_numbered(layout.format)
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from None
        found = f"the weight has a row map and grids of {layout.grid_rows} rows"
        mapped = fmt.shape is BlockShape.INTERLEAVED and len(scales) > 0
        require(not mapped, op, f"{found}, format {fmt.name} wants one matrix, or rows in order")
        for part in grids_of(op, values, scales, layout):
            check_packed(op, *part)
        return
    try:
        fmt = format_numbered(layout.format)
        fmt.check_block(layout.block)
        _check_origin(op, fmt, layout)
        fmt.grid(layout.shape, layout.block)
        shape, block = layout.stored_shape(fmt), layout.block
        blocks = prod(fmt.grid(shape, block))
    except ValueError as error:
        raise ValueError(f"{op}: {str(error).removeprefix(f'{op}: ')}") from None
    for what, t in [("values", values), *((f"scales[{i}]", s) for i, s in enumerate(scales))]:
        found = dtype_name(t.dtype)
        require(t.dtype == torch.uint8, op, f"{what} has dtype {found}, wanted uint8")
    if fmt.shape is BlockShape.GROUP:
        return _check_groups(op, fmt, values, scales, shape, blocks)
    if fmt.shape is BlockShape.INTERLEAVED:
        return _check_interleaved(op, fmt, values, scales, shape)
    wanted = fmt.packed_bytes(prod(shape))
    require(values.numel() == wanted, op, f"values has {values.numel()} bytes, wanted {wanted}")
    counts = (1, 4) if fmt.double_quant else (1, 2) if fmt.tensor_scale else (1,)
    require(
        len(scales) in counts,
        op,
        f"scales has {len(scales)} tensors, format {fmt.name} wants one of {counts}",
    )
    if len(scales) == 4:
        sizes = (blocks, 4 * -(-blocks // SCALE_GROUP), 4 * 256, 4)
        for i, (s, size) in enumerate(zip(scales, sizes, strict=True)):
            require(s.numel() == size, op, f"scales[{i}] has {s.numel()} bytes, wanted {size}")
        return
    try:
        fmt.scale_type(scales[0].numel(), blocks)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
    if len(scales) == 2:
        matrices, size = prod(shape[:-2]), scales[1].numel()
        require(
            size == 4 or (matrices > 1 and size == 4 * matrices),
            op,
            f"scales[1] (tensor) has {size} bytes, wanted 4",
        )


def check_weight(op: str, values: torch.Tensor, scales: Tensors, numbers: Sequence[int]) -> tuple[int, int]:
    """A packed weight, or with layout [0, 0, rows, cols] a plain one. Its rows and columns."""
    layout = read_matrix(op, numbers)
    rows, cols = layout.shape
    if layout.format != PLAIN:
        check_packed(op, values, scales, layout)
        grids = rows // layout.grid_rows if layout.grid_rows else 1
        require(grids == 1, op, f"the weight has {grids} grids, wanted 1")
        return rows, cols
    require(not scales, op, f"a plain weight has {len(scales)} scales, wanted 0")
    require(layout.block == 0, op, f"a plain weight has block size {layout.block}, wanted 0")
    cut = layout.origin or layout.grid_rows
    require(not cut, op, "a plain weight has an origin or grids, wanted neither")
    check_float(op, "a plain weight", values)
    fits = rows >= 0 and cols >= 0 and values.numel() == rows * cols
    require(fits, op, f"a plain weight has {values.numel()} elements, layout says {rows} x {cols}")
    return rows, cols


def check_low_rank(
    op: str,
    x: torch.Tensor,
    shape: tuple[int, int],
    u: torch.Tensor | None,
    b: torch.Tensor | None,
    a: torch.Tensor | None,
) -> None:
    """Beside a weight of this shape."""
    require((u is None) == (b is None), op, "u and b must come together")
    require(u is not None or a is None, op, "a is given without u and b, wanted all three")
    if u is not None and b is not None:
        check_beside(op, "u", u, x)
        rows, cols = shape
        for what, t, wanted in (("b", b, (rows, u.shape[-1])), ("a", a, (u.shape[-1], cols))):
            if t is not None:
                check_float(op, what, t)
                check_shape(op, what, t, wanted)


def check_head(
    op: str,
    x: torch.Tensor,
    values: torch.Tensor,
    scales: Tensors,
    layout: Sequence[int],
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    softcap: float,
    scale: float,
) -> None:
    """What every operator of a language model's head takes; reads the labels."""
    vocabulary, cols = check_weight(op, values, scales, layout)
    check_rows(op, "x", x)
    require(x.shape[-1] == cols, op, f"x has {x.shape[-1]} columns, the weight has {cols}")
    found = dtype_name(labels.dtype)
    require(labels.dtype == torch.int64, op, f"labels has dtype {found}, wanted int64")
    rows = prod(x.shape[:-1])
    require(labels.numel() == rows, op, f"labels has {labels.numel()} entries, x has {rows} rows")
    check_number(op, "softcap", softcap)
    check_number(op, "scale", scale, positive=True)
    if bias is not None:
        check_vector(op, "bias", bias, vocabulary, x.dtype)
    outside = (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))
    if labels.device.type != "cpu":
        wanted = f"wanted 0 to {vocabulary - 1}, or {IGNORED} for none"
        require_on_device(~outside.any(), op, f"a label is not in the vocabulary of {vocabulary}; {wanted}")
    elif bool(outside.any()):
        wrong = int(labels[outside].reshape(-1)[0])
        raise ValueError(
            f"{op}: label {wrong} is not in the vocabulary of {vocabulary}; wanted 0 to {vocabulary - 1}, "
            f"or {IGNORED} for none"
        )


def check_token_numbers(op: str, tokens: int, **vectors: torch.Tensor) -> None:
    """One float32 number per token each."""
    for what, t in vectors.items():
        check_vector(op, what, t, tokens, torch.float32)
