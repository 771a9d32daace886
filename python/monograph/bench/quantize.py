"""bf16 to packed: ours against a peer's CPU path and a copy of the same bytes.

nf4 and fp4 in blocks of 64 against bitsandbytes; the MX formats (rule floor) and NVFP4 (rule torchao) against
torchao; FP8 blocks against transformers.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch

import monograph as mg
from monograph.bench.report import Report
from monograph.bench.rounds import Work, geometric_mean, paired_rounds
from monograph.ops.formats import ABSMAX_FORMATS

SHAPES = [(4096, 4096), (14336, 4096)]


def _torchao(fmt: str, weight: torch.Tensor) -> object:
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    if fmt == "nvfp4":
        return nvfp4_quantize(weight, 16, per_tensor_amax_to_scale(weight.abs().max()))
    return to_mx(weight, torch.float4_e2m1fn_x2 if fmt == "mxfp4" else torch.float8_e4m3fn, 32)


def _transformers(weight: torch.Tensor) -> object:
    from monograph.upstream.transformers_names import Fp8Quantize, fp8_quantize_one

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    op = Fp8Quantize(SimpleNamespace(quantization_config=config))
    return fp8_quantize_one(op, "x.weight", weight)


def _works(fmt: str, weight: torch.Tensor) -> dict[str, Work]:
    copy = torch.empty_like(weight)
    works: dict[str, Work] = {"ours": lambda: mg.quantize(weight, fmt), "copy": lambda: copy.copy_(weight)}
    if fmt in ABSMAX_FORMATS:
        works["ours_double"] = lambda: mg.quantize(weight, fmt, double_quant=True)
        works["bitsandbytes"] = lambda: torch.ops.bitsandbytes.quantize_4bit(weight, 64, fmt, torch.uint8)
    elif fmt == "fp8-block":
        works["ours"] = lambda: mg.quantize(weight, fmt, rule="transformers")
        works["transformers"] = lambda: _transformers(weight)
    elif fmt != "nvfp4-divide":
        works["ours"] = lambda: mg.quantize(weight, fmt, rule="torchao")
        works["torchao"] = lambda: _torchao(fmt, weight)
    return works


def run(arguments: argparse.Namespace, report: Report) -> None:
    import bitsandbytes  # noqa: F401  (registers its ops)

    ratios: dict[str, list[float]] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for rows, cols in SHAPES[:1] if arguments.quick else SHAPES:
            weight = (torch.randn(rows, cols) * 0.02).bfloat16()
            works = _works(arguments.format, weight)
            result = paired_rounds(works, "ours", 3 if arguments.quick else 5)
            case = {"n": rows, "k": cols, "format": arguments.format, "dtype": "bfloat16", "threads": threads}
            report.case(case, result, "ours", limit="copy")
            for name, ratio in result.ratio.items():
                ratios.setdefault(f"{name}_{threads}_threads", []).append(ratio)
    report.summary({name: geometric_mean(r) for name, r in ratios.items()})
