"""What llama.cpp (PyPI's xllamacpp) says behind a text, and what transformers says behind its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from support.gguf_models import VOCABULARY

TOKENS = 16
# In a process of its own: what llama.cpp does not like it aborts.
ASK = """
import json, sys
import xllamacpp
model, adapter, prompt, count, banned = *sys.argv[1:3], *map(json.loads, sys.argv[3:])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, 128, 1, False
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if adapter:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
answer = xllamacpp.Server(params).handle_completions(
    {"prompt": prompt, "n_predict": count, "n_probs": %d, "temperature": 0.0, "cache_prompt": False,
     "logit_bias": [[token, False] for token in banned]}
)
rows = answer["choices"][0]["logprobs"]["content"]
first = {row["id"]: row["logprob"] for row in rows[0]["top_logprobs"]}
print("TOKENS", json.dumps([answer["usage"]["prompt_tokens"], [row["id"] for row in rows], first]))
"""


def answered(
    path: Any, prompt: str, banned: list[int], adapter: Any = ""
) -> tuple[int, list[int], dict[str, float]]:
    """Tokens of the prompt, greedy tokens behind it, log-probabilities of the first by its number."""
    arguments = (str(path), str(adapter), *map(json.dumps, (prompt, TOKENS, banned)))
    command = [sys.executable, "-c", ASK % VOCABULARY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert found, done.stderr[-2000:]
    count, tokens, first = json.loads(found[0].removeprefix("TOKENS "))
    return count, tokens, first


def not_text(tokenizer: Any) -> list[int]:
    """What the server would not list one by one: parts of characters, and what ends the text."""
    names = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    listed = [name.isascii() and name.isprintable() and not name.startswith("<0x") for name in names]
    return [token for token in range(VOCABULARY) if not (names[token] and listed[token])]


def generated(model: Any, ids: list[int], banned: list[int]) -> tuple[list[int], float, torch.Tensor]:
    """Greedy tokens, the smallest distance of a winner to the second, log-probabilities of the first."""
    ids, margin, first_step = list(ids), float("inf"), torch.empty(0)
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            first_step = logits.log_softmax(-1) if first_step.numel() == 0 else first_step
            logits[banned] = -torch.inf
        first, second = logits.topk(2)[0].tolist()
        margin = min(margin, first - second)
        ids.append(int(logits.argmax()))
    return ids[-TOKENS:], margin, first_step
