"""GRPO draws tokens with the log-probabilities that it trains them with: bf16, NF4, LoRA, every bit."""

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig

import monograph as mg
from monograph.hf.trl.mismatch import watch
from monograph.ops.show_config import chosen_isa
from support.trl_runs import WORDS, tokenizer, variety

# On a matrix unit attention of one query has other sums: such a machine runs this with MONOGRAPH_ISA=avx512.
pytestmark = [
    pytest.mark.per_isa,
    pytest.mark.skipif(chosen_isa() != "avx512", reason="on AVX-512 code only"),
]
ANSWER = 48
# Prompts of different lengths: TRL pads them on the left.
PROMPTS = [" ".join(WORDS[(7 * i + j) % 60] for j in range(5 + 9 * i)) for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Qwen3: norms of heads, groups of heads, tied embeddings."""
    root = tmp_path_factory.mktemp("qwen3")
    config = transformers.Qwen3Config(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=64,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(root)
    return root


def trainer_on(folder, output, **change):
    model = mg.from_pretrained(folder, mg.MonographConfig("nf4", double_quant=True))
    arguments = {
        "output_dir": str(output),
        "max_steps": 5,  # in the first the adapter is 0
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": ANSWER,
        "generation_kwargs": {"min_new_tokens": ANSWER - 4},
        "learning_rate": 1e-2,  # the adapter is far from 0 after a step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    torch.manual_seed(0)
    return trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(**arguments | change),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        reward_funcs=variety,
    )


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_trainer_and_generator_have_the_same_log_probabilities(mode, folder, tmp_path):
    """`graph` is what a recipe runs: regions under aot_eager."""
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if mode == "graph" else {}
    trainer = trainer_on(folder, tmp_path, **compiled)
    mg.optimize(trainer.model, regions=mode == "graph")
    mismatch = watch(trainer)
    trainer.train()
    assert mismatch.tokens > 1000
    assert (mismatch.differing, mismatch.largest) == (0, 0), str(mismatch)
    assert all(p.abs().max() > 1e-3 for n, p in trainer.model.named_parameters() if "lora_B" in n)


def test_the_comparison_sees_the_operators_of_torch(folder, tmp_path):
    """PEFT's layers, torch's attention and TRL's head, on the same bytes: nearly every token differs."""
    trainer = trainer_on(folder, tmp_path, max_steps=2)
    trainer.model.set_attn_implementation("sdpa")
    mismatch = watch(trainer)
    trainer.train()
    assert mismatch.tokens > 500
    assert mismatch.differing > mismatch.tokens / 2, str(mismatch)
    assert mismatch.largest > 1e-3, str(mismatch)
