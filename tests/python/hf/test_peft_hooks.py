"""What others do around our layer: hooks on the modules inside it, and the order of imports."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import monograph as mg
from support.packed_block import adapters

X = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))


def module_of(model, where):
    layer = model.base_model.model.up
    return layer.base_layer if where == "base_layer" else getattr(layer, where)["default"]


@pytest.mark.parametrize("when", ["before optimize", "after optimize"])
@pytest.mark.parametrize("where", ["base_layer", "lora_A", "lora_B", "lora_dropout"])
def test_a_hook_inside_a_fused_layer_runs(where, when):
    peft_model, ours = adapters()
    if when == "after optimize":
        mg.optimize(ours)
    for model in (peft_model, ours):
        module_of(model, where).register_forward_hook(lambda module, args, output: 2 * output)
    if when == "before optimize":
        mg.optimize(ours)
    want = peft_model(X)
    assert (ours(X) - want).norm() <= 2**-18 * want.norm()
    # A graph that is traced afterwards keeps it, and is still one.
    torch._dynamo.reset()
    counters.clear()
    graph = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert (graph(X) - want).norm() <= 2**-18 * want.norm()
    assert counters["stats"]["unique_graphs"] == 1


def test_a_bias_on_lora_a_counts():
    peft_model, ours = adapters()
    mg.optimize(ours)
    for model in (peft_model, ours):
        module_of(model, "lora_A").bias = nn.Parameter(torch.ones(8))
    want = peft_model(X)
    assert (ours(X) - want).norm() <= 2**-18 * want.norm()


ORDER = """
import importlib.util
import monograph as mg
{first}
from peft import LoraConfig, get_peft_model
import torch
block = torch.nn.Sequential(mg.nn.QuantLinear.from_linear(torch.nn.Linear(64, 64)))
model = get_peft_model(block, LoraConfig(target_modules=["0"], init_lora_weights=False))
want = model(torch.ones(1, 64))
merged = model.merge_and_unload()
assert (merged(torch.ones(1, 64)) - want).norm() <= 1e-4 * want.norm()
"""


@pytest.mark.parametrize(
    "first",
    [
        "importlib.util.find_spec('peft')",
        "from transformers import Trainer",
        "import monograph.hf.peft.lora_linear",
    ],
)
def test_any_order_of_imports(first):
    """Others look whether PEFT is installed before they import it."""
    done = subprocess.run([sys.executable, "-c", ORDER.format(first=first)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
