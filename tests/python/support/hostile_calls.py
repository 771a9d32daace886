"""One valid call for each operator, small and drawn at random: what hostile_arguments.py spoils.

A new operator needs a function here, by its name; nothing else.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

import monograph as mg
from monograph.ops import formats
from monograph.ops.layout import join_layouts, read_layout
from support.hostile_file_calls import (  # noqa: F401  (found here by the names of operators)
    DTYPES,
    checkpoint_sha256,
    floats,
    offload,
    read_ahead_close,
    read_ahead_events,
    read_ahead_numbers,
    read_ahead_open,
    read_gguf,
    reload,
    spill_close,
    spill_counts,
    spill_open,
    spill_same,
    wait,
)
from support.hostile_many_calls import (  # noqa: F401  (these too)
    gain_backward_many,
    gram_many,
    linear_many,
    linear_many_dx,
    low_rank_many,
    low_rank_many_dx,
    seeded_dropout_many,
    sum_rows_many,
)
from support.hostile_weights import FORMATS, sizes, weight


def linear(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, rank = r.choice(DTYPES), r.choice((1, 4))
    low = r.randrange(3)  # none, u and b, u and b and a
    u, b, a = floats(r, *lead, rank, dtype=dtype), floats(r, rows, rank), floats(r, rank, cols)
    return [
        floats(r, *lead, cols, dtype=dtype),
        *weight(r, rows, cols),
        r.choice((None, floats(r, rows, dtype=dtype))),
        u if low else None,
        b if low else None,
        a if low == 2 else None,
    ]


def linear_scaled(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, rank = r.choice(DTYPES), r.choice((1, 4))
    x, low = floats(r, *lead, cols, dtype=dtype), floats(r, *lead, rank, dtype=dtype)
    packed = weight(r, rows, cols)
    return [x, *packed, 1 + 0.01 * floats(r, rows), low, floats(r, rows, rank), floats(r, rank, cols)]


def gram(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, out = r.choice(DTYPES), r.choice(DTYPES)
    sums = floats(r, rows, cols, dtype=torch.float32) if r.random() < 0.5 else None
    return [floats(r, *lead, rows, dtype=dtype), floats(r, *lead, cols, dtype=dtype), sums, out]


def linear_dx(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype, rank = r.choice(DTYPES), r.choice((1, 4))
    low = [floats(r, *lead, rank, dtype=dtype), floats(r, rank, cols)] if r.random() < 0.5 else [None, None]
    return [floats(r, *lead, rows, dtype=dtype), *weight(r, rows, cols), *low]


def _several(r: Random, cols: int) -> tuple[list[int], list[Any]]:
    rows = [r.choice((1, 8, 33)) for _ in range(r.randrange(1, 4))]
    own = [weight(r, n, cols) for n in rows]
    numbers = join_layouts([layout for _, _, layout in own], [len(scales) for _, scales, _ in own])
    return rows, [[w[0] for w in own], [s for w in own for s in w[1]], numbers]


def linear_shared(r: Random) -> list[Any]:
    lead, _, cols = sizes(r)
    dtype, rank = r.choice(DTYPES), 4
    rows, packed = _several(r, cols)
    low = r.randrange(3)
    bias = [floats(r, n, dtype=dtype) for n in rows] if r.random() < 0.5 else []
    u = [floats(r, *lead, rank, dtype=dtype) for _ in rows] if low else []
    b = [floats(r, n, rank) for n in rows] if low else []
    a = [floats(r, rank, cols) for _ in rows] if low == 2 else []
    return [floats(r, *lead, cols, dtype=dtype), *packed, bias, u, b, a]


def linear_shared_dx(r: Random) -> list[Any]:
    lead, _, cols = sizes(r)
    dtype, rank = r.choice(DTYPES), 4
    rows, packed = _several(r, cols)
    low = r.random() < 0.5
    du = [floats(r, *lead, rank, dtype=dtype) for _ in rows] if low else []
    a = [floats(r, rank, cols) for _ in rows] if low else []
    return [[floats(r, *lead, n, dtype=dtype) for n in rows], *packed, du, a]


def _labels(r: Random, lead: list[int], rows: int) -> torch.Tensor:
    count = torch.Size(lead).numel()
    return torch.tensor([r.choice((-100, r.randrange(rows))) for _ in range(count)]).reshape(lead)


def linear_cross_entropy(r: Random) -> list[Any]:
    lead, rows, cols = sizes(r)
    dtype = r.choice(DTYPES)
    bias = r.choice((None, floats(r, rows, dtype=dtype)))
    labels = _labels(r, lead, rows)
    numbers = [r.choice((0.0, 30.0)), r.choice((1.0, 0.5)), r.random() < 0.5]
    return [floats(r, *lead, cols, dtype=dtype), *weight(r, rows, cols), bias, labels, *numbers]


linear_log_probs = linear_cross_entropy


def linear_cross_entropy_dw(r: Random) -> list[Any]:
    x, _, _, layout, bias, labels, softcap, scale, _ = linear_cross_entropy(r)
    dense = floats(r, *read_layout("", layout).shape, dtype=r.choice(DTYPES))
    return [x, dense, bias, labels, *(floats(r, labels.numel()) for _ in range(2)), softcap, scale]


def linear_entropy_dx(r: Random) -> list[Any]:
    *head, softcap, scale, _ = linear_cross_entropy(r)
    return [*head, *(floats(r, head[-1].numel()) for _ in range(3)), softcap, scale]


def linear_entropy_dw(r: Random) -> list[Any]:
    *head, softcap, scale = linear_cross_entropy_dw(r)
    return [*head, floats(r, head[3].numel()), softcap, scale]


def varlen_attention(r: Random) -> list[Any]:
    tokens, heads, size = r.randrange(1, 24), r.choice(((2, 1), (4, 2), (1, 1))), r.choice((8, 16, 33))
    dtype, value_size = r.choice(DTYPES), r.choice((8, 16))
    boundaries = sorted(r.randrange(tokens + 1) for _ in range(r.randrange(1, 4)))
    cu = torch.tensor([*boundaries, tokens], dtype=torch.int32)
    lengths = (cu[1:] - cu[:-1]).clone() if r.random() < 0.3 else None
    sinks = floats(r, heads[0]) if r.random() < 0.3 else None
    q, k = floats(r, tokens, heads[0], size, dtype=dtype), floats(r, tokens, heads[1], size, dtype=dtype)
    v = floats(r, tokens, heads[1], value_size, dtype=dtype)
    numbers = [r.random() < 0.5, r.choice((0, 3)), size**-0.5, r.choice((0.0, 20.0))]
    return [q, k, v, cu, cu.clone(), lengths, sinks, *numbers]


def varlen_attention_backward(r: Random) -> list[Any]:
    arguments = varlen_attention(r)
    out, lse = torch.ops.monograph.varlen_attention(*arguments)
    return [floats(r, *out.shape, dtype=out.dtype), *arguments[:3], out, lse, *arguments[3:]]


def rms_norm(r: Random) -> list[Any]:
    shape, dtype = [*r.choice(([1], [3], [2, 2], [17])), r.choice((1, 33, 64))], r.choice(DTYPES)
    weight = r.choice((None, floats(r, shape[-1], dtype=r.choice(DTYPES))))
    residual = r.choice((None, floats(r, *shape, dtype=dtype)))
    return [floats(r, *shape, dtype=dtype), weight, residual, 1e-6, r.random() < 0.5, r.random() < 0.5]


def rms_norm_backward(r: Random) -> list[Any]:
    x, weight, dsum, *options = rms_norm(r)
    y, _ = torch.ops.monograph.rms_norm(x, weight, None, *options)
    need = weight is not None and r.random() < 0.5
    return [floats(r, *x.shape, dtype=y.dtype), dsum, x, weight, *options, need]


def _boundaries(r: Random, tokens: int) -> torch.Tensor:
    """Offsets of documents, some empty; tokens may stand before the first and after the last."""
    return torch.tensor(sorted(r.randrange(tokens + 1) for _ in range(r.randrange(1, 5))), dtype=torch.int32)


def causal_conv1d(r: Random) -> list[Any]:
    tokens, channels, taps = r.choice((0, 1, 3, 17)), r.choice((1, 3, 40)), r.randrange(1, 9)
    dtype, cu = r.choice(DTYPES), _boundaries(r, tokens)
    x = floats(r, tokens, channels, dtype=dtype)
    if r.random() < 0.5:  # tokens innermost
        x = floats(r, channels, tokens, dtype=dtype).t()
    weight = floats(r, channels, taps, dtype=r.choice((dtype, DTYPES[0])))
    bias = r.choice((None, floats(r, channels, dtype=r.choice((dtype, DTYPES[0])))))
    state = r.choice((None, floats(r, cu.numel() - 1, channels, taps - 1, dtype=dtype)))
    return [x, weight, bias, cu, state, r.random() < 0.5, r.random() < 0.5]


def causal_conv1d_backward(r: Random) -> list[Any]:
    x, weight, bias, cu, state, silu, keep = causal_conv1d(r)
    shape = [cu.numel() - 1, weight.shape[0], weight.shape[1] - 1]
    dfinal = floats(r, *shape, dtype=x.dtype) if keep else None
    need = [r.random() < 0.8 for _ in range(4)]
    return [floats(r, *x.shape, dtype=x.dtype), dfinal, x, weight, bias, cu, state, silu, need]


def gated_delta_rule(r: Random) -> list[Any]:
    tokens, heads = r.choice((0, 1, 5, 11)), r.choice(((1, 1), (1, 2), (2, 4)))
    key_size, size, dtype, cu = r.choice((4, 16)), r.choice((4, 16)), r.choice(DTYPES), _boundaries(r, tokens)
    q, k = (floats(r, tokens, heads[0], key_size, dtype=dtype) for _ in range(2))
    v = floats(r, tokens, heads[1], size, dtype=dtype)
    g = -floats(r, tokens, heads[1], dtype=r.choice((dtype, DTYPES[0]))).abs()
    beta = floats(r, tokens, heads[1], dtype=r.choice((dtype, DTYPES[0]))).sigmoid()
    state = r.choice((None, floats(r, cu.numel() - 1, heads[1], key_size, size)))
    return [q, k, v, g, beta, cu, state, key_size**-0.5, True, r.random() < 0.5]


def gated_delta_rule_backward(r: Random) -> list[Any]:
    *arguments, scale, l2norm, keep = gated_delta_rule(r)
    q, _, v, _, _, cu, _ = arguments
    dfinal = floats(r, cu.numel() - 1, v.shape[1], q.shape[2], v.shape[2]) if keep else None
    return [floats(r, *v.shape, dtype=v.dtype), dfinal, *arguments, scale, l2norm]


def rms_norm_gated(r: Random) -> list[Any]:
    shape, dtype = [*r.choice(([1], [3], [2, 2], [17])), r.choice((1, 33, 64))], r.choice(DTYPES)
    weight = r.choice((None, floats(r, shape[-1], dtype=r.choice(DTYPES))))
    x, z = (floats(r, *shape, dtype=dtype) for _ in range(2))
    return [x, z, weight, 1e-6, r.randrange(2), r.random() < 0.5]


def rms_norm_gated_backward(r: Random) -> list[Any]:
    x, *rest = rms_norm_gated(r)
    return [floats(r, *x.shape, dtype=x.dtype), x, *rest]


def silu_mul(r: Random) -> list[Any]:
    shape, dtype = r.choice(([5], [3, 33], [2, 2, 64])), r.choice(DTYPES)
    return [floats(r, *shape, dtype=dtype) for _ in range(2)]


def silu_mul_backward(r: Random) -> list[Any]:
    gate, up = silu_mul(r)
    return [floats(r, *gate.shape, dtype=gate.dtype), gate, up]


def gelu_mul(r: Random) -> list[Any]:
    return [*silu_mul(r), r.random() < 0.5]


def gelu_mul_backward(r: Random) -> list[Any]:
    return [*silu_mul_backward(r), r.random() < 0.5]


def rotary(r: Random) -> list[Any]:
    batch, tokens, size, dtype = r.choice((1, 2)), r.choice((1, 5)), r.choice((8, 34)), r.choice(DTYPES)
    q, k = (floats(r, batch, tokens, heads, size, dtype=dtype) for heads in (r.choice((1, 4)), 1))
    cos, sin = (floats(r, batch, tokens, 8, dtype=dtype) for _ in range(2))
    weights = [r.choice((None, floats(r, size, dtype=dtype))) for _ in range(2)]
    return [q, k, cos, sin, *weights, 1e-6, *(r.random() < 0.5 for _ in range(3))]


def rotary_backward(r: Random) -> list[Any]:
    q, k, *rest = rotary(r)
    gradients = [floats(r, *t.shape, dtype=t.dtype) for t in (q, k)]
    return [*gradients, q, k, *rest, r.random() < 0.5]


def quantize(r: Random) -> list[Any]:
    fmt = formats.FORMATS[r.choice(FORMATS[:-1])]
    shape = r.choice(((3, 64), (2, 2, 96), (1, 32), (5, 0), (64,)))
    block = r.choice(fmt.block_sizes[:2])
    rule, scale_bytes = r.choice((0, formats.RULES[r.choice(list(fmt.rules.values()))])), 0
    double = fmt.double_quant and r.random() < 0.5
    if fmt.shape is formats.BlockShape.ROW and shape[-1] % block:
        shape = (3, 64)
    return [
        floats(r, *shape, dtype=r.choice(DTYPES)),
        fmt.number,
        block,
        double,
        r.random() < 0.5,
        rule,
        scale_bytes,
    ]


def dequantize(r: Random) -> list[Any]:
    packed = weight(r, r.choice((1, 8, 33)), r.choice((32, 96)), r.choice(FORMATS[:-1]))
    return [*packed, r.choice(DTYPES)]


def dequantize_out(r: Random) -> list[Any]:
    *packed, dtype = dequantize(r)
    return [*packed, torch.empty(read_layout("", packed[2]).shape, dtype=dtype)]


def split_quantize(r: Random) -> list[Any]:
    fmt = formats.FORMATS[r.choice(FORMATS[:-1])]
    splits = [r.choice((0, 32, 64)) for _ in range(r.randrange(0, 4))]
    rule = r.choice((0, formats.RULES[r.choice(list(fmt.rules.values()))]))
    return [
        floats(r, sum(splits), 64, dtype=r.choice(DTYPES)),
        splits,
        fmt.number,
        fmt.block_sizes[0],
        r.random() < 0.7,
        r.random() < 0.5,
        r.random() < 0.5,
        rule,
    ]


def pack(r: Random) -> list[Any]:
    lengths = torch.tensor([r.randrange(0, 20) for _ in range(r.randrange(0, 12))], dtype=torch.int64)
    return [lengths, r.choice((20, 64)), r.choice((0, 3)), r.randrange(2), r.randrange(3)]


def pack_stream(r: Random) -> list[Any]:
    lengths = torch.tensor([r.randrange(1, 20) for _ in range(r.randrange(0, 12))], dtype=torch.int64)
    rows = torch.tensor([[i, 5, 1] for i in range(r.randrange(0, 3))], dtype=torch.int64).reshape(-1, 3)
    return [lengths, rows, 3, 32, r.choice((0, 4)), 4]


def adamw(r: Random) -> list[Any]:
    shapes = [r.choice(((3, 4), (5,), (1, 2, 3))) for _ in range(r.randrange(1, 4))]
    parameters, gradients, first = ([floats(r, *s) for s in shapes] for _ in range(3))
    second = [floats(r, *s).abs() for s in shapes]
    decay = [r.choice((0.0, 0.1)) for _ in shapes]
    return [
        parameters,
        gradients,
        first,
        second,
        torch.tensor(2.0),
        torch.tensor(1e-3),
        0.9,
        0.999,
        1e-8,
        decay,
        1.0,
    ]


adamw_update = adamw


def rotary_angles(r: Random) -> list[Any]:
    positions = torch.tensor([r.randrange(5000) for _ in range(r.choice((1, 7)))])
    return [
        positions,
        floats(r, r.choice((1, 8)), dtype=torch.float32),
        r.choice((1.0, 1.2)),
        r.choice(DTYPES),
    ]


def rotary_frequencies(r: Random) -> list[Any]:
    return [r.randrange(4), r.choice((2, 64)), [1e4, 8.0, 1.0, 4.0, 8192.0, 32.0, 1.0, 1.0]]


def seeded_dropout(r: Random) -> list[Any]:
    return [floats(r, 3, r.choice((4, 33)), dtype=r.choice(DTYPES)), torch.tensor(7), r.randrange(9), 0.5]


def seeded_dropout_part(r: Random) -> list[Any]:
    return [*seeded_dropout(r), r.choice((0, 3, 4096))]


def gain_backward(r: Random) -> list[Any]:
    dtype = r.choice(DTYPES)
    dy, y = (floats(r, 3, 5, dtype=dtype) for _ in range(2))
    return [dy, r.choice((y, None)), floats(r, 5).abs() + 1]


def limit_move(r: Random) -> list[Any]:
    return [torch.zeros(16384, dtype=torch.uint8), torch.zeros(65536, dtype=torch.uint8)]


def limit_tiles(r: Random) -> list[Any]:
    return [r.randrange(4)]


def limit_vectors(r: Random) -> list[Any]:
    return [r.randrange(4)]


def system_info(r: Random) -> list[Any]:
    return []


def _stacks(r: Random, experts: int, rows: int, hidden: int, inner: int) -> tuple[list[Any], list[Any], bool]:
    """[values, scales, layout] of both weights of a layer of experts, and whether they are transposed."""
    shapes, name = [(experts, rows, hidden), (experts, hidden, inner)], r.choice(FORMATS)
    if name == "plain":
        transposed, dtype = r.random() < 0.5, r.choice(DTYPES)
        shapes = [(e, b, a) if transposed else (e, a, b) for e, a, b in shapes]
        first, second = ([floats(r, *s, dtype=dtype) * 0.1, [], [0, 0, *s]] for s in shapes)
        return first, second, transposed
    name = r.choice((name, "int4", "int8", "fp8"))  # these have a grid an expert
    rule = "minmax" if name in ("int4", "int8") and r.random() < 0.5 else "default"
    block = 32 if name == "int4" else None
    packed = [mg.quantize(floats(r, *s) * 0.1, name, block_size=block, rule=rule) for s in shapes]
    first, second = ([w.values, list(w.scales), list(w.layout)] for w in packed)
    return first, second, False


def experts(r: Random) -> list[Any]:
    tokens, k, count, inner, hidden = r.choice((1, 5)), r.choice((1, 2)), r.choice((1, 3)), 32, 64
    activation, dtype, rank = r.randrange(6), r.choice(DTYPES), r.choice((1, 4))
    rows = 2 * inner if activation < 4 else inner
    first, second, transposed = _stacks(r, count, rows, hidden, inner)
    low: list[Any] = [None] * 4
    if r.random() < 0.7:
        low[:2] = floats(r, rank * count, hidden), floats(r, rows, rank * count)
    if r.random() < 0.7:
        low[2:] = floats(r, rank * count, inner), floats(r, hidden, rank * count)
    ids = torch.tensor([[r.randrange(-1, count + 1) for _ in range(k)] for _ in range(tokens)])
    bias = [r.choice((None, floats(r, count, n, dtype=dtype))) for n in (rows, hidden)]
    return [
        *(
            floats(r, tokens, hidden, dtype=dtype),
            ids,
            floats(r, tokens, k, dtype=r.choice((dtype, DTYPES[0]))),
        ),
        *(*first, bias[0], *second, bias[1], *low, 0.5, 2.0),
        *(activation, activation < 4 and r.random() < 0.5, 1.702, 7.0, transposed, r.random() < 0.5),
    ]


def experts_backward(r: Random) -> list[Any]:
    arguments = experts(r)
    y, pre = torch.ops.monograph.experts(*arguments)
    need = [r.random() < 0.8 for _ in range(6)]
    return [floats(r, *y.shape, dtype=y.dtype), pre, *arguments[:-1], need]


def experts_dw(r: Random) -> list[Any]:
    arguments = experts(r)
    while arguments[4]:
        arguments = experts(r)
    y, pre = torch.ops.monograph.experts(*arguments)
    return [floats(r, *y.shape, dtype=y.dtype), pre, *arguments[:-1]]


def experts_slots(r: Random) -> list[Any]:
    x, _, _, *rest, _ = experts(r)
    count = rest[2][2] if rest[2][0] >= 0 else rest[2][4]
    slots = r.choice((0, 1, 7))
    return [
        x,
        torch.tensor([r.randrange(len(x)) for _ in range(slots)], dtype=torch.long),
        torch.tensor([r.randrange(count) for _ in range(slots)], dtype=torch.long),
        *rest,
    ]


def experts_slots_backward(r: Random) -> list[Any]:
    x, rows, ids, *rest = experts_slots(r)
    weights = floats(r, len(ids), dtype=r.choice((x.dtype, DTYPES[0])))
    need = [r.random() < 0.8 for _ in range(6)]
    return [floats(r, *x.shape, dtype=x.dtype), x, rows, ids, weights, *rest, need]


def combine_slots(r: Random) -> list[Any]:
    rows = floats(r, r.choice((0, 1, 9)), r.choice((1, 33)), dtype=r.choice(DTYPES))
    tokens, k = r.choice((1, 5)), r.choice((1, 3))
    places = torch.tensor([[r.randrange(-1, len(rows) + 1) for _ in range(k)] for _ in range(tokens)])
    weights = floats(r, tokens, k, dtype=r.choice((rows.dtype, DTYPES[0])))
    return [rows, places, r.choice((None, weights))]


def choose_experts(r: Random) -> list[Any]:
    logits = floats(r, r.choice((0, 1, 5)), r.choice((4, 33)), dtype=r.choice(DTYPES))
    return [logits, r.choice((1, 3)), r.random() < 0.5]


def choose_experts_backward(r: Random) -> list[Any]:
    logits, k, normalise = choose_experts(r)
    ids = torch.stack([torch.randperm(logits.shape[1])[:k] for _ in range(len(logits))] or [torch.zeros(k)])
    ids = ids[: len(logits)].long()
    return [floats(r, len(logits), k, dtype=logits.dtype), logits, ids, normalise]
