"""The elementwise operators against Inductor's code and transformers' eager code, bf16, Qwen3's shapes.

`inductor` is transformers' code under torch.compile with fixed shapes, `transformers` the same code eager.
Both passes of a case start from leaves with gradients; weights of norms are frozen, as under LoRA.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from monograph.bench.passes import Function, passes, random_bf16
from monograph.bench.report import Report
from monograph.bench.rounds import geometric_mean, paired_rounds
from monograph.ops.gated_activation import gelu_mul, silu_mul
from monograph.ops.rms_norm import rms_norm
from monograph.ops.rotary import rotary


def _eager_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm.forward."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _eager_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat((-b, a), dim=-1) * sin[:, :, None]


def _cases(tokens: int, width: int) -> dict[str, tuple[list[torch.Tensor], Function, Function]]:
    """Leaves, ours, transformers' code."""
    weight, head = random_bf16(width), random_bf16(128)
    cos, sin = random_bf16(1, tokens, 128), random_bf16(1, tokens, 128)

    def norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = residual + x
        return _eager_norm(s, weight), s

    def turn(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_eager_rotary(_eager_norm(t, head), cos, sin) for t in (q, k))

    heads = [random_bf16(1, tokens, width // 64, 128), random_bf16(1, tokens, 8, 128)]
    halves = [random_bf16(tokens, 3 * width) for _ in range(2)]
    return {
        "norm_residual": (
            [random_bf16(tokens, width), random_bf16(tokens, width)],
            lambda x, residual: rms_norm(x, weight, residual),
            norm,
        ),
        "qk_norm_rotary": (heads, lambda q, k: rotary(q, k, cos, sin, head, head), turn),
        "silu_mul": (halves, lambda g, u: (silu_mul(g, u),), lambda g, u: (F.silu(g) * u,)),
        "gelu_mul": (
            halves,
            lambda g, u: (gelu_mul(g, u, tanh=True),),
            lambda g, u: (F.gelu(g, approximate="tanh") * u,),
        ),
    }


def run(arguments: argparse.Namespace, report: Report) -> None:
    groups: dict[str, list[float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for width in (1024,) if arguments.quick else (1024, 4096):
            for name, (leaves, ours, eager) in _cases(1024, width).items():
                torch.compiler.reset()
                compiled = torch.compile(eager, fullgraph=True, dynamic=False)
                functions: dict[str, Function] = {"ours": ours, "inductor": compiled, "transformers": eager}
                for backward in (False, True):
                    result = paired_rounds(passes(leaves, functions, backward), "ours", 11, least_ms=5.0)
                    kind = "both" if backward else "forward"
                    case = {"case": name, "m": 1024, "n": width, "dtype": "bfloat16", "threads": threads}
                    report.case(case | {"pass": kind}, result, "ours")
                    for peer, ratio in result.ratio.items():
                        groups.setdefault(f"{peer}_over_ours_{kind}_{threads}_threads", []).append(ratio)
    report.summary({name: geometric_mean(values) for name, values in groups.items()})
