"""`monograph estimate` against a run: a Llama of transformers' config class, packed, with LoRA, two steps."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from monograph.__main__ import main

pytestmark = pytest.mark.slow
TOKENS = 1024
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8000,
    "use_cache": False,
}

# Prints the bytes of the parts, and how far a step lifts the memory of the process. The first step traces.
RUN = """
import json, sys, torch
import monograph as mg
from peft import LoraConfig
from monograph.training import TrainStep

folder, tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
model = mg.from_pretrained(folder, mg.MonographConfig("nf4", double_quant=True))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
step = TrainStep(model, mode="graph", dynamic=False)
ids = torch.arange(tokens)[None] % 8000
batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(tokens)[None]}
step([batch], learning_rate=1e-4)

def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":"))

before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # resets the high-water mark
step([batch], learning_rate=1e-4)
trained = {id(p) for p in model.parameters() if p.requires_grad}
moments = [t for name, t in step.state_dict().items() if name.startswith("exp_avg")]
print(json.dumps({
    "base": sum(t.nbytes for t in [*model.parameters(), *model.buffers()] if id(t) not in trained),
    "adapter": sum(p.nbytes for p in model.parameters() if p.requires_grad),
    "moments": sum(t.nbytes for t in moments),
    "step": status("VmHWM") - before,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA), dtype=torch.bfloat16).save_pretrained(path)
    return path


def measured(folder):
    # Tensors that are freed go back at once, so that the resident set is what is alive.
    thresholds = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 28)}
    command = [sys.executable, "-c", RUN, str(folder), str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | thresholds)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_within_a_tenth_of_a_run(folder, capsys):
    assert (
        main(["estimate", str(folder / "config.json"), "--rank", "16", "--tokens", str(TOKENS), "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)["bytes"]
    run = measured(folder)
    for name in ("base", "adapter", "moments"):
        assert found[name] == run[name], name
    step = found["gradients"] + found["activations"]
    assert step == pytest.approx(run["step"], rel=0.1)
    assert sum(found.values()) == pytest.approx(sum(run.values()), rel=0.1)


def test_more_tokens_and_fewer_bits_show(folder, capsys):
    def bytes_of(*arguments):
        assert main(["estimate", str(folder), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["bytes"]

    few, many = bytes_of("--tokens", "512"), bytes_of("--tokens", "1024")
    assert 1.8 < many["activations"] / few["activations"] < 2.1
    assert bytes_of("--tokens", "512", "--no-checkpointing")["activations"] > 1.3 * few["activations"]
    assert bytes_of("--format", "none", "--tokens", "16")["base"] > 1.5 * few["base"]
    assert bytes_of("--rank", "8", "--tokens", "16")["moments"] * 2 == few["moments"]


def test_a_tied_head_is_counted_once(tmp_path, capsys):
    sizes = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}

    def base_bytes(tied):
        LlamaConfig(**sizes, tie_word_embeddings=tied).save_pretrained(tmp_path)
        assert main(["estimate", str(tmp_path), "--tokens", "16", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["bytes"]["base"]

    assert base_bytes(tied=False) - base_bytes(tied=True) == 8000 * 64 * 2  # the head, bf16


def test_what_cannot_be_estimated_is_named(tmp_path, capsys):
    assert main(["estimate", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert main(["estimate", str(tmp_path), "--tokens", "0"]) == 2
    assert "--tokens is 0, wanted 1 or more" in capsys.readouterr().err
