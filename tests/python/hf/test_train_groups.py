"""A step of training on compressed-tensors' integers and FP8 by row, loaded as they lie."""

import pytest
import torch
from peft import LoraConfig

import monograph as mg
from monograph.nn import QuantLinear
from monograph.training import TrainStep
from support import producer_folders

pytestmark = pytest.mark.slow
pytest.importorskip("compressed_tensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return producer_folders.make_source(tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16", "INT8", "FP8_DYNAMIC", "FP8"])
def test_lora_learns_and_the_base_keeps_its_bytes(tmp_path, source, preset):
    producer_folders.compressed_tensors(source, tmp_path, {preset: ["Linear"]})
    torch.manual_seed(0)
    base = mg.from_pretrained(tmp_path)
    model = mg.add_lora(base, LoraConfig(r=4, target_modules="all-linear"))
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
    assert len(layers) == 13
    before = [[t.clone() for t in (layer.values, *layer.scales)] for layer in layers]
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    step = TrainStep(model)
    losses = [step([{"input_ids": ids, "labels": ids}], 5e-3).loss.item() for _ in range(8)]
    assert losses[-1] < 0.99 * losses[0], losses
    for layer, tensors in zip(layers, before, strict=True):
        kept = zip((layer.values, *layer.scales), tensors, strict=True)
        assert all(torch.equal(now, then) for now, then in kept)
