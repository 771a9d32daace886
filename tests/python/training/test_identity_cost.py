"""What is looked at before each step costs at most 0.5 % of a step of `monograph.bench step`'s quick case."""

import time

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

import monograph as mg
from monograph.bench.step import cases
from monograph.nn import replace_linears
from monograph.packing import PackedCollator
from monograph.training import TrainStep

pytestmark = pytest.mark.slow


def least(work, calls):
    """Seconds of processor time: other programs' are not counted."""
    found = []
    for _ in range(calls):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return min(found)


def test_the_checks_before_a_step_cost_half_a_percent_at_most(capsys):
    case = cases(quick=True)["quick"]
    config = dict(case["config"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    replace_linears(model.to(torch.bfloat16), "nf4")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    documents = [torch.randint(0, config["vocab_size"], (n,)) for n in case["lengths"]]
    batch = PackedCollator(max_documents=16)([{"input_ids": ids} for ids in documents])
    step = TrainStep(model, mode="graph")
    step([batch], 1e-3)
    whole = least(lambda: step([batch], 1e-3), 3)
    identity = least(step._check_identity, 100)
    ranks = least(lambda: step._same.numbers(step._identity.named_modules), 100)
    with capsys.disabled():
        print(f"\nstep {whole:.3f} s, identity {identity * 1e3:.2f} ms, ranks {ranks * 1e3:.2f} ms more")
    assert identity + ranks <= 0.005 * whole
