"""The operators of recurrent layers against transformers' own functions for the CPU, bf16.

`rule` is the gated delta rule with heads of 128, `conv` the short convolution of q, k and v (8192 channels at
32 value heads; channels innermost, as the projection leaves them), `norm` the gated norm of the heads;
`decode` is one token behind a state through the convolution and the rule. 16 key heads, fewer where there
are fewer value heads. The peer gets what a layer of transformers gives it: a transposed view for the
convolution, key heads repeated for the rule.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from monograph.bench.passes import Function, passes, random_bf16
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.causal_conv1d import causal_conv1d
from monograph.ops.gated_delta_rule import gated_delta_rule
from monograph.ops.rms_norm_gated import rms_norm_gated
from monograph.upstream import transformers_names

KEY_HEADS, SIZE, TAPS = 16, 128, 4

Tensors = tuple[torch.Tensor, ...]


def _boundaries(tokens: int) -> torch.Tensor:
    return torch.tensor([0, tokens], dtype=torch.int32)


def _channels(heads: int) -> int:
    return (2 * min(KEY_HEADS, heads) + heads) * SIZE


def _rule_inputs(tokens: int, heads: int) -> list[torch.Tensor]:
    keys = min(KEY_HEADS, heads)
    g, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads).bfloat16()
    return [
        random_bf16(tokens, keys, SIZE),
        random_bf16(tokens, keys, SIZE),
        random_bf16(tokens, heads, SIZE),
        g,
        beta,
    ]


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
    """With a batch, and a key head for each value head."""
    group = v.shape[1] // q.shape[1]
    return [t[None] for t in (q.repeat_interleave(group, 1), k.repeat_interleave(group, 1), v, *rest)]


def _rule(tokens: int, heads: int) -> tuple[list[torch.Tensor], Function, Function]:
    cu = _boundaries(tokens)

    def peer(*inputs: torch.Tensor) -> Tensors:
        out, _ = transformers_names.torch_chunk_gated_delta_rule(
            *_repeated(*inputs), use_qk_l2norm_in_kernel=True
        )
        return (out[0],)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Tensors:
        g, beta = rest
        return (gated_delta_rule(q, k, v, g, beta, cu)[0],)

    return _rule_inputs(tokens, heads), ours, peer


def _conv(tokens: int, heads: int) -> tuple[list[torch.Tensor], Function, Function]:
    cu, channels = _boundaries(tokens), _channels(heads)

    def peer(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        y = transformers_names.causal_conv1d_fn(x.t()[None], weight, None, "silu")
        return (y[0].t(),)

    leaves = [random_bf16(tokens, channels), random_bf16(channels, TAPS)]
    return leaves, lambda x, weight: (causal_conv1d(x, weight, None, cu)[0],), peer


def _norm(tokens: int, heads: int) -> tuple[list[torch.Tensor], Function, Function]:
    module = transformers_names.Qwen3NextRMSNormGated(SIZE)

    def peer(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return (torch.func.functional_call(module, {"weight": weight}, (x, z)),)

    leaves = [
        random_bf16(tokens * heads, SIZE),
        random_bf16(tokens * heads, SIZE),
        1 + 0.1 * random_bf16(SIZE),
    ]
    return leaves, lambda x, z, weight: (rms_norm_gated(x, z, weight),), peer


def _decode(heads: int) -> dict[str, Work]:
    cu, keys, channels = _boundaries(1), min(KEY_HEADS, heads), _channels(heads)
    x, weight = random_bf16(1, channels), random_bf16(channels, TAPS)
    past, state = random_bf16(1, channels, TAPS - 1), torch.randn(1, heads, SIZE, SIZE)
    cache = random_bf16(1, channels, TAPS)
    _, _, _, g, beta = _rule_inputs(1, heads)
    parts = (keys * SIZE, keys * SIZE, heads * SIZE)

    def split(y: torch.Tensor) -> list[torch.Tensor]:
        return [t.unflatten(1, (-1, SIZE)) for t in y.split(parts, 1)]

    def ours() -> object:
        y, now = causal_conv1d(x, weight, None, cu, past, keep_state=True)
        q, k, v = split(y)
        return gated_delta_rule(q, k, v, g, beta, cu, state, keep_state=True), now

    def peer() -> object:
        y = transformers_names.causal_conv1d_update(x.t()[None], cache, weight, None, "silu")
        inputs = _repeated(*split(y[0].t()), g, beta)
        return transformers_names.torch_recurrent_gated_delta_rule(
            *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return {"ours": ours, "transformers": peer}


_CASES = {"rule": _rule, "conv": _conv, "norm": _norm}


def _cases(quick: bool) -> Iterator[tuple[str, int, int, str]]:
    """op, tokens, value heads, pass."""
    shapes = [(512, 4)] if quick else [(2048, 32), (8192, 4)]
    for tokens, heads in shapes:
        for op in _CASES:
            for which in ("both",) if quick else ("forward", "both"):
                yield op, tokens, heads, which
    yield "decode", 1, 4 if quick else 32, "forward"


def run(arguments: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(0)
    groups: dict[str, list[float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for op, tokens, heads, which in _cases(arguments.quick):
            if arguments.case and op not in arguments.case:
                continue
            if op == "decode":
                with torch.inference_mode():
                    result = paired_rounds(_decode(heads), "ours", 15)
            else:
                leaves, ours, peer = _CASES[op](tokens, heads)
                works = passes(leaves, {"ours": ours, "transformers": peer}, which == "both")
                rounds = 3 if op == "rule" or arguments.quick else 7
                result = paired_rounds(works, "ours", rounds, least_ms=5.0, watch_limit=True)
            case = {"op": op, "tokens": tokens, "heads": heads, "pass": which, "threads": threads}
            report.case(case, result, "ours")
            key = f"{op}_{tokens}x{heads}_{which}_{threads}_threads_transformers"
            groups.setdefault(key, []).append(result.ratio["transformers"])
    report.summary({name: geometric_mean(values) for name, values in groups.items()})
