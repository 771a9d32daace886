"""Seconds to the first step of `TrainStep`, family by family: 6 layers of width 128, one thread.

    python tools/first_step_families.py                  # all, as a table
    python tools/first_step_families.py llama gemma4_text

Processor seconds of one process each, imports left out; recorded in bench/results/first_step_families.md.
A family above 10 s should have said so in one line before tracing: the last column.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any

LAYERS = 6
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512, "head_dim": 32}
HALF = ["sliding_attention", "full_attention"] * (LAYERS // 2)
RECURRENT = ["linear_attention", "full_attention"] * (LAYERS // 2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **EXPERTS},
    "qwen3_next": {"head_dim": 32, "layer_types": RECURRENT, **EXPERTS},
    "olmo2": {},
    "gemma2": {"head_dim": 32, "layer_types": HALF},
    "gemma3_text": {"head_dim": 32, "layer_types": HALF},
    "gemma3n_text": {"layer_types": HALF, "num_kv_shared_layers": 2, "laurel_rank": 8, **PER_LAYER},
    "gemma4_text": {"layer_types": HALF, "num_kv_shared_layers": 2, "global_head_dim": 32, **PER_LAYER},
    "gpt_oss": {"head_dim": 32, "layer_types": HALF, **LOCAL_EXPERTS},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phimoe": LOCAL_EXPERTS,
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32, "moe_intermediate_size": 64, **ROUTED},
    "granite": {},
    "granitemoe": LOCAL_EXPERTS,
}


def first_step(kind: str) -> str:
    """A row of the table."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    import monograph as mg
    from monograph.training import TrainStep

    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("monograph").addHandler(Heard())
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(kind, **SIZES | FAMILIES[kind])
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = LoraConfig(r=4, target_modules=r".*(q_proj|qkv_proj)")
    model = mg.optimize(get_peft_model(model, adapter))
    ids = torch.arange(64)[None] + 2
    begin = time.process_time()
    TrainStep(model)([{"input_ids": ids, "labels": ids.clone()}], 1e-4)
    seconds = time.process_time() - begin
    lines = "; ".join(line.removeprefix("monograph: ") for line in said if "trac" in line)
    return f"| {kind} | {seconds:.1f} | {lines} |"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print(first_step(sys.argv[2]))
        return
    print(
        f"| family, {LAYERS} layers of width 128 | first step, s | said before |\n|---|---|---|", flush=True
    )
    for kind in sys.argv[1:] or FAMILIES:
        command = [sys.executable, "-W", "ignore", __file__, "--one", kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (done.stderr.strip().splitlines() or ["nothing printed"])[-1]
        print(
            done.stdout.strip().splitlines()[-1]
            if done.returncode == 0
            else f"| {kind} | failed: {last} | |",
            flush=True,
        )


if __name__ == "__main__":
    main()
