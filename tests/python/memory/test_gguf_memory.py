"""No dense copy of a GGUF base: load and one step within the file, the adapter and what a step holds."""

import pytest

from monograph.bench.peak_memory import peak_bytes
from monograph.cli.estimate import estimate
from support.gguf_bases import mixed_base

pytestmark = pytest.mark.slow

SETUP = """
import torch
import monograph as mg
from peft import LoraConfig
from monograph.training import TrainStep

def work(path):
    model = mg.add_lora(mg.from_pretrained(path), LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.arange(64)[None] % 300
    TrainStep(model)([{{"input_ids": ids, "labels": ids}}], learning_rate=1e-3)
    return model

kept = work({small!r})
"""
SLACK = 32 << 20  # scratch of kernels, and what Python keeps of a trace


def test_the_peak_is_the_file(tmp_path):
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small, _ = mixed_base("Qwen3", tmp_path / "small")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    large, model = mixed_base("Qwen3", tmp_path / "large", **sizes)
    file = large.stat().st_size
    dense = 2 * sum(parameter.numel() for parameter in model.parameters())
    # An adapter, its gradients and moments, and what a step of 64 tokens holds; the base is the file.
    found = estimate(str(large), format_name=None, double_quant=False, rank=4, tokens=64, checkpointing=False)
    beside = sum(size for name, size in found.items() if name != "base")
    assert dense > 1.5 * (file + beside + SLACK)  # else the test could not fail
    peak = peak_bytes(SETUP.format(small=str(small)), f"kept = work({str(large)!r})")
    sizes = {"file": file, "beside": beside, "dense": dense, "peak": peak}
    print(", ".join(f"{name} {size >> 20} MiB" for name, size in sizes.items()))
    assert peak < file + beside + SLACK
