"""llama.cpp itself with an exported model, against transformers: the same greedy tokens from the same text.

Needs PyPI's xllamacpp, which CI does not install.
"""

import json
import subprocess
import sys

import pytest
import torch

from support.gguf_models import PROMPT, VOCABULARY, model_of, save
from support.native_tool import run

pytest.importorskip("xllamacpp")
TOKENS = 16
# Seeds whose tokens vary and never win narrowly: ggml rounds activations to the type of the weights.
SEEDS = {"Llama": 9, "Mistral": 0, "Qwen3": 19, "Gemma3": 31}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Of the log-probabilities of the first token. ggml's GELU, Gemma's, is a table in fp16.
TOLERANCES = {"f32": 2e-3, "f16": 1e-2, "bf16": 1e-1}
# In a process of its own: what llama.cpp does not like it aborts.
ASK = """
import json, sys
import xllamacpp
model, prompt, count, banned = sys.argv[1], *map(json.loads, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = model, 128, 1, False
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
answer = xllamacpp.Server(params).handle_completions(
    {"prompt": prompt, "n_predict": count, "n_probs": %d, "temperature": 0.0, "cache_prompt": False,
     "logit_bias": [[token, False] for token in banned]}
)
rows = answer["choices"][0]["logprobs"]["content"]
first = {row["id"]: row["logprob"] for row in rows[0]["top_logprobs"]}
print("TOKENS", json.dumps([answer["usage"]["prompt_tokens"], [row["id"] for row in rows], first]))
"""


def served(path, prompt, banned):
    command = [sys.executable, "-c", ASK % VOCABULARY, str(path), *map(json.dumps, (prompt, TOKENS, banned))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert found, done.stderr[-2000:]
    return json.loads(found[0].removeprefix("TOKENS "))


def not_text(tokenizer):
    """What the server would not list one by one: parts of characters, and what ends the text."""
    names = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    listed = [name.isascii() and name.isprintable() and not name.startswith("<0x") for name in names]
    return [token for token in range(VOCABULARY) if not (names[token] and listed[token])]


def generated(model, ids, banned):
    """Greedy tokens, the smallest distance of a winner to the second, log-probabilities of the first."""
    ids, margin, first_step = list(ids), float("inf"), None
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            first_step = logits.log_softmax(-1) if first_step is None else first_step
            logits[banned] = -torch.inf
        first, second = logits.topk(2)[0].tolist()
        margin = min(margin, first - second)
        ids.append(int(logits.argmax()))
    return ids[-TOKENS:], margin, first_step


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Gemma3"])
def test_llama_cpp_generates_the_tokens_of_transformers(tmp_path, name, kind):
    model = model_of(name, DTYPES[kind], SEEDS[name])
    tokenizer = save(model, name, tmp_path / "model", DTYPES[kind])
    run("export", tmp_path / "model", tmp_path / "model.gguf", "--to", "gguf")
    ids, banned = tokenizer.encode(PROMPT).ids, not_text(tokenizer)
    wanted, margin, log_probs = generated(model, ids, banned)
    prompt_tokens, found, first = served(tmp_path / "model.gguf", PROMPT, banned)
    error = max(abs(first[str(i)] - log_probs[i].item()) for i in range(VOCABULARY))
    print(name, kind, "margin", margin, "error", error)
    assert margin > 0.03
    assert len(set(wanted)) >= 3
    assert prompt_tokens == len(ids)
    assert found == wanted
    assert error < TOLERANCES[kind]
