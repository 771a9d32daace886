"""float16: the loss is scaled as torch's GradScaler does, inside the graph; results of float32."""

import itertools

import pytest
import torch
import torch._dynamo
from peft import LoraConfig
from torch._dynamo.utils import counters

import monograph as mg
from monograph.nn import replace_linears
from monograph.packing import PackedCollator
from monograph.recipe import check_keys
from monograph.recipe.train import train
from monograph.training import TrainStep
from monograph.training.loss_scale import LossScale
from support.recipe_files import make_instruction_world, small_recipe
from support.run_traces import adapter_bytes, trace
from support.step_models import SMALL, batches
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow


def build(dtype, head=1.0, **options):
    """The same values in any dtype: weights are rounded to float16 first."""
    model = tiny_llama(**SMALL | {"num_hidden_layers": 1})
    with torch.no_grad():
        model.lm_head.weight.mul_(head)
    model.to(torch.float16).to(dtype)
    replace_linears(model, "nf4")
    return mg.add_lora(
        model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, **options)
    )


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("initial", [2.0**16, 2.0**125, 2.0**-148])
def test_the_scale_follows_gradscaler(initial):
    """Growth, backoff, both ends of float32: against torch's own kernel."""
    torch.manual_seed(0)
    ours = LossScale(initial, growth_interval=3)
    scale, tracker = torch.tensor(initial), torch.zeros((), dtype=torch.int32)
    for finite in (torch.rand(60) < 0.85).tolist() + [True] * 20 + [False] * 5:
        found = torch.tensor(0.0 if finite else 1.0)
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 3)
        ours.update(torch.tensor(finite))
        assert ours.scale.item() == scale.item()
        assert ours.good_steps.item() == tracker.item()
    gradient = torch.randn(100)
    want = gradient.clone()
    torch._amp_foreach_non_finite_check_and_unscale_(
        [want], torch.zeros(()), scale.double().reciprocal().float()
    )
    assert torch.equal(ours.unscaled(gradient), want)
    defaults = torch.amp.GradScaler("cpu").state_dict()
    assert defaults["scale"] == LossScale().scale.item()
    assert defaults["growth_interval"] == LossScale().growth_interval
    assert (defaults["growth_factor"], defaults["backoff_factor"]) == (2.0, 0.5)


def gradients(step, batch):
    update, found = step.state.update, []
    step.state.update = lambda gradient, *rest: found.append(gradient.clone()) or update(gradient, *rest)
    step([batch], 1e-3)
    step.state.update = update
    return step.state.views(found[0])


def test_gradients_are_those_of_float32_because_of_the_scale():
    """600 targets and a small head: the gradient of a hidden state is about 2^-22, below float16's 2^-14.

    Scaled, an error is one of about ten roundings of 2^-11 on the way back.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (601,), generator=generator)
    batch = PackedCollator(max_documents=2)([{"input_ids": ids}])
    want = gradients(TrainStep(build(torch.float32, 2.0**-7), mode="eager"), batch)
    worst = {}
    for scaling in (None, False):
        step = TrainStep(build(torch.float16, 2.0**-7), mode="eager", loss_scaling=scaling)
        got = gradients(step, batch)
        assert got.keys() == want.keys()
        worst[scaling] = max(((got[n] - w).norm() / w.norm()).item() for n, w in want.items())
    assert worst[None] <= 10 * 2**-11
    assert worst[False] > 4 * worst[None]


def test_it_trains_as_float32_does():
    """A logit is rounded to 2^-11 of itself; the losses of twelve steps stay within four such units."""
    wide, narrow = (TrainStep(build(dtype), mode="eager") for dtype in (torch.float32, torch.float16))
    assert wide.loss_scale is None
    assert narrow.loss_scale is not None
    rows = batches(True, 8)
    for number in range(12):
        batch = rows[number % 8]
        want, got = wide([batch], 1e-2), narrow([batch], 1e-2)
        assert abs(got.loss - want.loss) <= 4 * 2**-11 * want.loss
        assert got.loss_scale == 2.0**16
    assert want.loss_scale is None


@pytest.mark.parametrize("mode", ["graph", "inductor", "whole_step"])
def test_one_graph_skips_and_grows_as_eager_does(mode):
    """The first steps overflow and change the scale alone; then it grows. One graph, the bits of eager."""
    options = {"dtype": torch.float16, "lora_dropout": 0.05}
    steps = [TrainStep(build(**options), mode=m, backend="aot_eager") for m in (mode, "eager")]
    for step in steps:
        step.loss_scale = LossScale(2.0**21, growth_interval=1)
    before = steps[0].state.flat.clone()
    scales, norms = [], []
    for number, batch in enumerate(batches(True, 10)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            got = steps[0]([batch], 1e-2)
        want = steps[1]([batch], 1e-2)
        assert (got.loss.item(), got.loss_scale.item()) == (want.loss.item(), want.loss_scale.item())
        assert torch.equal(steps[0].state.flat, steps[1].state.flat)
        if not torch.isfinite(got.grad_norm):
            assert not scales or scales[-1] == 2 * got.loss_scale.item()
            assert norms or torch.equal(steps[0].state.flat, before)
        scales.append(got.loss_scale.item())
        norms += [got.grad_norm.item()] if torch.isfinite(got.grad_norm) else []
    assert scales[0] == 2.0**20
    assert 0 < len(norms) < len(scales)
    assert any(after == 2 * first for first, after in itertools.pairwise(scales))
    assert steps[0].state.steps == len(norms)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_the_recipe_trains_and_resumes_with_the_scale(tmp_path):
    root = make_instruction_world(tmp_path)

    def recipe(out, **change):
        keys = small_recipe(root, "instruction", output_dir=str(tmp_path / out), lora_dropout=0.05)
        keys |= {"torch_compile": False, "num_epochs": 2, "micro_batch_size": 2, "save_steps": 5}
        return check_keys(keys | change).recipe

    train(recipe("wide", bf16=False))
    train(recipe("whole", fp16=True))
    wide, whole = trace(tmp_path / "wide"), trace(tmp_path / "whole")
    skipped = ["skipped_steps" in line for line in whole].index(
        True
    )  # at 2^16 a step of this model overflows
    assert skipped >= 3
    for want, got in zip(wide[:skipped], whole[:skipped], strict=True):
        assert abs(got["loss"] - want["loss"]) <= 4 * 2**-11 * want["loss"]
    assert [line["loss_scale"] for line in whole] == [2.0**16] * skipped + [2.0**15] * (10 - skipped)
    train(recipe("cut", fp16=True, max_steps=5, lr_scheduler="constant"))
    train(recipe("cut", fp16=True, lr_scheduler="constant", resume_from_checkpoint="auto"))
    train(recipe("flat", fp16=True, lr_scheduler="constant"))
    assert trace(tmp_path / "cut") == trace(tmp_path / "flat")
    assert adapter_bytes(tmp_path / "cut") == adapter_bytes(tmp_path / "flat")
    with pytest.raises(ValueError, match="fp16 is true and bf16 true; write one of the two"):
        recipe("both", fp16=True, bf16=True)


def test_a_state_without_a_scale_is_refused():
    narrow, wide = (TrainStep(build(dtype), mode="eager") for dtype in (torch.float16, torch.float32))
    with pytest.raises(ValueError, match=r"missing \['loss_scale', 'loss_scale_good_steps'\]"):
        narrow.load_state_dict(wide.state_dict())
    with pytest.raises(ValueError, match=r"unexpected \['loss_scale', 'loss_scale_good_steps'\]"):
        wide.load_state_dict(narrow.state_dict())
    state = narrow.state_dict() | {"loss_scale": torch.tensor(8.0)}
    narrow.load_state_dict(state)
    assert narrow.loss_scale.scale == 8.0
