"""llama.cpp itself, of PyPI's xllamacpp, asked for the next token of one prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

TOKENS = [1, 20, 33, 47, 5, 60, 71, 18]
# In a process of its own: what llama.cpp does not like it aborts.
ASK = """
import json, sys
import xllamacpp
model, adapter, tokens, vocabulary = *sys.argv[1:3], json.loads(sys.argv[3]), int(sys.argv[4])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, 64, 1, False
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if adapter:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
answer = xllamacpp.Server(params).handle_completions(
    {"prompt": tokens, "n_predict": 1, "n_probs": vocabulary, "temperature": 0.0, "cache_prompt": False}
)
rows = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print("LOGPROBS", json.dumps({row["id"]: row["logprob"] for row in rows}))
"""


def served(model: Any, adapter: Any = "", vocabulary: int = 320) -> torch.Tensor:
    """Log-probabilities of the next token by llama.cpp."""
    command = [sys.executable, "-c", ASK, str(model), str(adapter), json.dumps(TOKENS), str(vocabulary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert found, done.stderr[-2000:]
    rows = json.loads(found[0].removeprefix("LOGPROBS "))
    return torch.tensor([rows[str(i)] for i in range(vocabulary)])
