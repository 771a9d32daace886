"""One process of `monograph.bench first_step`: builds a model, runs two steps, prints their times as JSON.

The mode, the number of layers and, if not 2, of threads:

    python -m monograph.bench.first_step_contender graph 32
    python -m monograph.bench.first_step_contender inductor 32 1
    python -m monograph.bench.first_step_contender peer 32
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

TOKENS = 1024

# Qwen3-0.6B, with as many layers as the command says; the vocabulary small, it plays no part in compiling.
WIDTH: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
}


def dense_model(layers: int) -> Any:
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**WIDTH, num_hidden_layers=layers))
    return model.to(torch.bfloat16)


def lora() -> LoraConfig:
    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def rows() -> list[dict[str, Any]]:
    from monograph.packing import PackedCollator

    generator = torch.Generator().manual_seed(0)
    collate = PackedCollator(pad_to_multiple_of=TOKENS, max_documents=8)
    documents = [
        [torch.randint(0, 4096, (n,), generator=generator).tolist() for n in lengths]
        for lengths in ([400, 300, 200], [500, 350, 100])
    ]
    return [collate([{"input_ids": ids} for ids in row]) for row in documents]


def ours(mode: str, layers: int) -> list[tuple[float, float]]:
    import monograph as mg
    from monograph.nn import replace_linears
    from monograph.training import TrainStep

    model: Any = replace_linears(dense_model(layers), "nf4", double_quant=True)
    model.gradient_checkpointing_enable()
    step = TrainStep(mg.add_lora(model, lora()), mode=mode, dynamic=False)
    return [_timed(lambda batch=batch: step([batch], 1e-4)) for batch in rows()]


def peer(layers: int) -> list[tuple[float, float]]:
    """transformers, PEFT and bitsandbytes as the HF Trainer compiles them; torch's AdamW."""
    from bitsandbytes.nn.modules import Linear4bit
    from torch import nn

    model = dense_model(layers)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            packed = Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            packed.load_state_dict(layer.state_dict())
            model.set_submodule(name, packed.to("cpu"))
    model.gradient_checkpointing_enable()
    wrapped = get_peft_model(model, lora())
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4)
    compiled: Any = torch.compile(wrapped)

    def step(batch: dict[str, Any]) -> None:
        names = ("input_ids", "labels", "position_ids")
        compiled(**{name: batch[name] for name in names}, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [_timed(lambda batch=batch: step(batch)) for batch in rows()]


def _timed(work: Any) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    who, layers, *threads = sys.argv[1], *(int(word) for word in sys.argv[2:])
    torch.set_num_threads(threads[0] if threads else 2)
    (first, first_used), (second, second_used) = peer(layers) if who == "peer" else ours(who, layers)
    processor = {"first_processor": first_used, "second_processor": second_used}
    print(json.dumps({"first": first, "second": second, **processor}))


if __name__ == "__main__":
    main()
