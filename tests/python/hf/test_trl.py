"""TRL's SFT, DPO and GRPO trainers on packed weights: they learn what they learn from dense ones."""

import pytest
import torch
import torch._dynamo
from peft import PeftModel

import monograph as mg
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.training.regions import TRACES, forget, region_layers
from support.trl_runs import make_folder, trainer_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


def trained(kind, model, output, **change):
    trainer = trainer_for(kind, model, output, **change)
    if any(isinstance(layer, mg.nn.QuantLinear) for layer in model.modules()):
        mg.optimize(trainer.model)  # with the loading, the lines that change in a script
        assert any(isinstance(layer, LoraLinear) for layer in trainer.model.modules())
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer, before, steps


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_three_steps_and_an_adapter_that_reloads(kind, folder, tmp_path):
    trainer, before, steps = trained(kind, mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    assert len(steps) == 3
    assert all(entry["grad_norm"] > 0 for entry in steps)
    moved = [n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(before[n], p)]
    assert len(moved) == len(before) == 28  # A and B of seven layers in two blocks

    trainer.save_model(tmp_path / "adapter")
    ids = torch.arange(3, 40)[None]
    trainer.model.eval()
    with torch.no_grad():
        want = trainer.model(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(
            mg.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapter"
        )
        plain = loaded(input_ids=ids).logits
        got = mg.optimize(loaded)(input_ids=ids).logits
        base = mg.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
    assert torch.equal(got, want)
    torch.testing.assert_close(plain, want, rtol=1e-4, atol=1e-4)
    assert (base - want).abs().max() > 1e-3  # the adapter does something


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_autocast_as_trl_sets_it_by_default(kind, folder, tmp_path):
    """bf16=True. Norms and embeddings are float32 in this folder: rotary embeddings make q and k float32, and
    v is bfloat16 as every product is."""
    _, _, steps = trained(kind, mg.from_pretrained(folder), tmp_path, bf16=True)
    assert len(steps) == 3
    assert all(entry["grad_norm"] > 0 for entry in steps)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_losses_are_those_of_the_dequantised_model(kind, folder, tmp_path):
    """The same values, data and seeds under PEFT's own layers, torch's attention and fp32.

    (bitsandbytes is no reference for digits: it computes in bf16, and TRL casts its adapters to bf16.)
    AdamW turns a gradient near 0 that rounds to the other side into a step of 1e-3 to the other side.
    """
    _, _, ours = trained(kind, mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    dense = mg.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").dequantize()
    _, _, want = trained(kind, dense, tmp_path)
    for step, (a, b) in enumerate(zip(ours, want, strict=True)):
        tolerance = 1e-5 if step == 0 else 1e-3
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance), step
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * tolerance), step


@pytest.mark.parametrize(
    "setting",
    [{"neftune_noise_alpha": 50.0}, {"optim": "adafactor"}],
    ids=["neftune", "optimizer"],
)
def test_what_a_recipe_refuses_runs_here(setting, folder, tmp_path):
    """The ways through TRL that the recipe names: each changes the run, and the run is finite."""
    packed = [mg.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]
    plain, there = (
        trained("sft", model, tmp_path, **change)[2]
        for model, change in zip(packed, ({}, setting), strict=True)
    )
    losses = [[entry["loss"] for entry in steps] for steps in (plain, there)]
    assert len(losses[1]) == 3
    assert all(0 < loss < 20 for loss in losses[1])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_regions_under_a_compiling_trainer_have_the_bits_of_eager_mode(kind, folder, tmp_path):
    """DPO runs its reference with the adapter disabled, without gradients: a trace of its own."""
    found = []
    forget()
    torch._dynamo.reset()
    for regions in (False, True):
        compiling = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if regions else {}
        model = mg.from_pretrained(folder, dtype=torch.float32)
        trainer = trainer_for(kind, model, tmp_path, **compiling)
        mg.optimize(trainer.model, regions=regions)
        trainer.train()
        steps = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "grad_norm" in e]
        found.append((steps, dict(trainer.model.named_parameters())))
    (want, plain), (got, parameters) = found
    assert got == want
    assert all(torch.equal(parameters[name], value) for name, value in plain.items())
    assert len(region_layers(trainer.model)) == 2
    assert 2 <= TRACES.graphs <= 3
