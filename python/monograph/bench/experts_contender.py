"""A peer of `bench experts` as a process of its own: one step of one layer for each line read.

    python -m monograph.bench.experts_contender '{"peer": "kt_bf16", "width": "qwen3", "tokens": 512,
        "rank": 16, "threads": 2, "pass": "step"}'

`grouped_mm_peft` is transformers' layer (experts_implementation="grouped_mm") and PEFT's target_parameters.
`kt_*` are kt-kernel's experts: `pip install --no-deps kt-kernel==0.7.2 gguf` (its metadata asks for another
torch; it loads beside this one). Its int8 and MXFP4 weights are made from the same bf16 ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from monograph.bench.experts_case import WIDTHS, Width, batch, random_stack

KT_METHODS = {"kt_bf16": "AMXBF16_SFT", "kt_int8": "AMXINT8_SFT", "kt_mxfp4": "MXFP4_SFT"}
Step = Callable[[], object]


def grouped_mm_peft(name: str, width: Width, job: dict[str, Any]) -> Step:
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import GptOssConfig, Qwen3MoeConfig

    from monograph.upstream.transformers_names import (
        GptOssExperts,
        Qwen3MoeExperts,
        set_experts_implementation,
    )

    common: dict[str, Any] = {"hidden_size": width.hidden, "num_experts_per_tok": width.top}
    config: Any
    if name == "gpt-oss":
        config = GptOssConfig(**common, intermediate_size=width.inner, num_local_experts=width.experts)
        made: Any = GptOssExperts
    else:
        config = Qwen3MoeConfig(**common, moe_intermediate_size=width.inner, num_experts=width.experts)
        made = Qwen3MoeExperts
    set_experts_implementation(config, "grouped_mm")
    with torch.device("meta"):
        layer: Any = made(config)
    layer = layer.to_empty(device="cpu").bfloat16()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            if parameter.dim() == 3:
                count, rows, cols = parameter.shape
                parameter.copy_(random_stack(count, rows, cols, i))
            else:
                parameter.zero_()
    model: Any = torch.nn.Module()
    model.experts = layer
    wanted = ["experts.gate_up_proj", "experts.down_proj"]
    rank = job["rank"]
    if rank:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=wanted)
        inject_adapter_in_model(lora, model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.02)
    else:
        model.requires_grad_(False)
    x, dy, ids, weights = batch(width, job["tokens"])
    x.requires_grad_()
    weights = weights.bfloat16().requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> object:
        y = model.experts(x, ids, weights)
        return None if job["pass"] == "forward" else torch.autograd.grad(y, [x, weights, *trained], dy)

    return step


def _kt_load(wrapper: Any, method: str, width: Width) -> None:
    e, h, i = width.experts, width.hidden, width.inner
    order = torch.arange(e, dtype=torch.int64)
    gate, up, down = (random_stack(e, i, h, 1), random_stack(e, i, h, 2), random_stack(e, h, i, 3))
    if method == "AMXBF16_SFT":
        wrapper.load_weights_from_tensors(gate, up, down, order)
    elif method == "AMXINT8_SFT":
        # Its Python refuses to quantise here and its C++ does it.
        wrapper.gate_proj, wrapper.up_proj, wrapper.down_proj = gate, up, down
        wrapper.load_weights(order)
    else:
        import monograph as mg

        weights: dict[str, list[torch.Tensor]] = {}
        for name, stack in {"gate": gate, "up": up, "down": down}.items():
            packed = [mg.quantize(one, "mxfp4") for one in stack]
            weights[name] = [p.values for p in packed]
            weights[f"{name}_scale"] = [torch.exp2(p.scales[0].float() - 127).bfloat16() for p in packed]
        wrapper.load_mxfp4_weights(weights, order)


def kt(name: str, width: Width, job: dict[str, Any]) -> Step:
    from kt_kernel.sft.amx import AMXSFTMoEWrapper

    method, rank, tokens = KT_METHODS[job["peer"]], job["rank"], job["tokens"]
    e, h, i = width.experts, width.hidden, width.inner
    wrapper = AMXSFTMoEWrapper(
        layer_idx=0,
        num_experts=e,
        num_experts_per_tok=width.top,
        hidden_size=h,
        moe_intermediate_size=i,
        num_gpu_experts=0,
        cpuinfer_threads=job["threads"],
        threadpool_count=1,
        weight_path="",
        chunked_prefill_size=tokens,
        lora_rank=rank,
        lora_alpha=2.0 * rank,
        method=method,
        group_size=32 if method == "MXFP4_SFT" else 128,
        zero_point=False,
        swiglu_limit=7.0 if method == "MXFP4_SFT" else 0.0,
    )
    wrapper.share_backward_bb = False
    shapes = [(e, rank, h), (e, i, rank)] * 2 + [(e, rank, i), (e, h, rank)]
    low = [(torch.randn(shape) * 0.02).bfloat16() for shape in shapes]
    wrapper.init_lora_weights(*low, *(torch.zeros_like(t) for t in low))
    _kt_load(wrapper, method, width)
    x, dy, ids, weights = batch(width, tokens)

    def step() -> object:
        forward = job["pass"] == "forward"
        y = wrapper.forward(x, ids, weights, save_for_backward=not forward)
        if not forward:
            wrapper.backward(dy)
            for entry in wrapper.authoritative_optimizer_grads:
                entry.parameter.grad = None
        return y

    return step


def main() -> None:
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kt-kernel's C++ writes to standard output
    torch.set_num_threads(job["threads"])
    width = WIDTHS[job["width"]]
    step = (grouped_mm_peft if job["peer"] == "grouped_mm_peft" else kt)(job["width"], width, job)
    step()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - start)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
