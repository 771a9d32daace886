"""A step over a model with two adapters trains those that are active, as PEFT does, or says why not."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import monograph as mg
from monograph.nn import QuantLinear
from monograph.training import TrainStep
from support.recipe_files import make_model

IDS = torch.randint(3, 400, (2, 16), generator=torch.Generator().manual_seed(3))
BATCH = {"input_ids": IDS, "labels": IDS}
RATE = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switched")
    make_model(folder)
    return folder


def with_adapters(model):
    for name, rank in (("a", 4), ("b", 8)):
        torch.manual_seed(rank)
        config = LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = (
            get_peft_model(model, config, name)
            if name == "a"
            else (model.add_adapter(name, config), model)[1]
        )
    return model.train()


def models(folder):
    """Ours on a packed base, and PEFT's on the same weights dequantised."""
    from transformers import AutoModelForCausalLM

    packed = mg.from_pretrained(folder, mg.MonographConfig("nf4"), dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in packed.named_modules():
        if isinstance(layer, QuantLinear):
            dense.get_submodule(name).weight.data.copy_(layer.dequantize(torch.float32))
    ours, theirs = with_adapters(packed), with_adapters(dense)
    mg.optimize(ours)
    return ours, theirs


@pytest.mark.parametrize("active", [["a"], ["b"], ["a", "b"]], ids="+".join)
def test_the_active_adapters_train_as_under_peft(folder, active):
    ours, theirs = models(folder)
    for model in (ours, theirs):
        model.base_model.set_adapter(active)
    step = TrainStep(ours, mode="eager", weight_decay=0.0, max_grad_norm=1.0)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    for _ in range(3):
        loss = theirs(**BATCH).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert float(step([BATCH], RATE).loss) == pytest.approx(float(loss.detach()), abs=1e-5)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("now", "told"), [(["b"], "is trained now"), (["a", "b"], "lora_A.b.* is trained now")]
)
def test_a_step_that_was_made_for_another_adapter_is_refused(folder, mode, now, told):
    model = models(folder)[0]
    model.set_adapter("a")
    step = TrainStep(model, mode=mode)
    step([BATCH], RATE)
    model.base_model.set_adapter(now)
    with pytest.raises(RuntimeError, match=told):
        step([BATCH], RATE)
    model.set_adapter("a")
    step([BATCH], RATE)
