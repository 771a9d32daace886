"""llama.cpp itself with an exported model, against transformers: the same greedy tokens from the same text.

Needs PyPI's xllamacpp, which CI does not install.
"""

import pytest
import torch

from support.gguf_models import PROMPT, VOCABULARY, model_of, save
from support.llama_cpp_text import answered, generated, not_text
from support.native_tool import run

pytest.importorskip("xllamacpp")
# Seeds whose tokens vary and never win narrowly: ggml rounds activations to the type of the weights.
SEEDS = {
    "Llama": 9, "Mistral": 0, "Qwen3": 19, "Gemma3": 31, "Qwen3Moe": 32, "Mixtral": 9, "Qwen2": 5, "Phi3": 5,
    "GptOss": 3,
}  # fmt: skip
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Of the log-probabilities of the first token. ggml's GELU, Gemma's, is a table in fp16.
TOLERANCES = {"f32": 2e-3, "f16": 1e-2, "bf16": 1e-1}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", SEEDS)
def test_llama_cpp_generates_the_tokens_of_transformers(tmp_path, name, kind):
    model = model_of(name, DTYPES[kind], SEEDS[name])
    tokenizer = save(model, name, tmp_path / "model", DTYPES[kind])
    run("export", tmp_path / "model", tmp_path / "model.gguf", "--to", "gguf")
    ids, banned = tokenizer.encode(PROMPT).ids, not_text(tokenizer)
    wanted, margin, log_probs = generated(model, ids, banned)
    prompt_tokens, found, first = answered(tmp_path / "model.gguf", PROMPT, banned)
    error = max(abs(first[str(i)] - log_probs[i].item()) for i in range(VOCABULARY))
    print(name, kind, "margin", margin, "error", error)
    assert margin > 0.03
    assert len(set(wanted)) >= 3
    assert prompt_tokens == len(ids)
    assert found == wanted
    assert error < TOLERANCES[kind]
