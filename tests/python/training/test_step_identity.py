"""A step before which the model was changed: taken over, refused by name, or made anew with its moments."""

import pytest
import torch
from torch import nn

from monograph.training import TrainStep
from support.model_changes import (
    adapter,
    batch,
    build,
    cast_base,
    decoder,
    lora_layers,
    second_adapter,
    trained,
)

RATE = 1e-2


def made(mode="eager", **built):
    return TrainStep(build(**built), mode=mode)


def norm_of(step):
    return decoder(step.model).norm.weight


def test_a_rebuilt_step_keeps_the_moments_of_what_stayed():
    step = made()
    for seed in range(3):
        step([batch(seed)], RATE)
    before = step.state.views(step.state.exp_avg)
    norm_of(step).requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"model.norm.weight is trained now; step.rebuild\(\) makes"):
        step([batch(3)], RATE)
    step.rebuild()
    after = step.state.views(step.state.exp_avg)
    assert len(after) == len(before) + 1
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert step.state.steps == 3


def test_what_joins_later_is_corrected_by_its_own_count():
    """torch.optim.AdamW with a parameter group that is added after three steps."""
    step, rate = TrainStep(build(), mode="eager", max_grad_norm=0.0), 1e-2
    twin = build()
    optimizer = torch.optim.AdamW(trained(twin), lr=rate, weight_decay=0.0, fused=True)

    def plain(seed):
        twin.train()
        twin(**batch(seed), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(6):
        if seed == 3:
            for model in (step.model, twin):
                decoder(model).norm.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [decoder(twin).norm.weight]})
            step.rebuild()
        step([batch(seed)], rate)
        plain(seed)
        if seed == 3:  # the first update of a parameter is the rate, by each element
            moved = (norm_of(step) - 1).abs()
            assert torch.allclose(moved, torch.full_like(moved, rate), rtol=1e-2)
    assert torch.allclose(norm_of(step), decoder(twin).norm.weight, atol=1e-4)
    for name, want in adapter(twin).items():
        assert torch.allclose(adapter(step.model)[name], want, atol=1e-3), name
    assert step.state.steps == 6


@pytest.mark.parametrize("mode", ["eager", pytest.param("whole_step", marks=pytest.mark.slow)])
def test_a_run_with_a_late_parameter_resumes_with_its_bits(mode):
    step = made(mode)
    step([batch(0)], RATE)
    norm_of(step).requires_grad_(True)
    step.rebuild()
    step([batch(1)], RATE)
    state = step.state_dict()
    assert state["joined.base_model.model.model.norm.weight"] == 1
    other = build()
    decoder(other).norm.weight.requires_grad_(True)
    resumed = TrainStep(other, mode=mode)
    resumed.load_state_dict(state)
    for seed in (2, 3):
        assert step([batch(seed)], RATE).loss.item() == resumed([batch(seed)], RATE).loss.item()
    assert torch.equal(step.state.flat, resumed.state.flat)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in step.state_dict().items())


def test_a_rebuilt_step_trains_a_second_adapter():
    step = made()
    step([batch(0)], RATE)
    name = second_adapter(step.model)
    step.model.base_model.set_adapter(["default", name])
    with pytest.raises(RuntimeError, match=rf"lora_A.{name}.weight is trained now"):
        step([batch(1)], RATE)
    step.rebuild()
    before = adapter(step.model)
    for seed in (1, 2):
        step([batch(seed)], RATE)
    after = adapter(step.model)
    assert all(not torch.equal(before[n], after[n]) for n in before if f".{name}." in n)


def test_a_dropout_of_a_later_adapter_is_seeded_by_rebuild():
    step = made()
    step([batch(0)], RATE)
    for layer in lora_layers(step.model):
        layer.lora_dropout["default"] = nn.Dropout(0.5)
    with pytest.raises(RuntimeError, match=r"lora_dropout.default drops with p=0.5 and draws from torch's"):
        step([batch(1)], RATE)
    step.rebuild()
    state = step.state_dict()
    first = step([batch(1)], RATE).loss.item()
    torch.manual_seed(99)
    step.load_state_dict(state)
    assert step([batch(1)], RATE).loss.item() == first


def test_a_merged_adapter_is_named():
    step = made()
    step([batch(0)], RATE)
    step.model.merge_adapter()
    with pytest.raises(
        RuntimeError, match=r"q_proj: adapter 'default' is trained and merged into its base, want"
    ):
        step([batch(1)], RATE)
    step.model.unmerge_adapter()
    step([batch(1)], RATE)


@pytest.mark.parametrize("mode", ["graph", "whole_step", "inductor_whole_step"])
def test_a_gradient_hook_that_was_there_before_is_named(mode):
    """Nothing is compiled before it is found."""
    model = build()
    trained(model)[1].register_hook(lambda gradient: gradient * 0)
    with pytest.raises(RuntimeError, match=rf"lora_B.default.weight has a gradient hook .*mode '{mode}'"):
        TrainStep(model, mode=mode)([batch(0)], RATE)


@pytest.mark.parametrize("mode", ["graph", "whole_step", "per_layer", "inductor"])
def test_a_backward_hook_that_was_there_before_is_named(mode):
    model = build()
    path, module = next((path, m) for path, m in model.named_modules() if path.endswith("0.mlp"))
    module.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=rf"{path} has a backward hook .*mode '{mode}'"):
        TrainStep(model, mode=mode)([batch(0)], RATE)


def test_the_average_of_weights_is_evaluated_in_a_graph():
    step = made("inductor", layers=1)
    step._evaluate = step._eval_loss  # as the graph computes, without compiling it
    want = made().evaluate(batch(0))[0].item()
    kept = [p.data for p in trained(step.model)]
    for p in trained(step.model):
        p.data = p.data * 3
    other = step.evaluate(batch(0))[0].item()
    for p, data in zip(trained(step.model), kept, strict=True):
        p.data = data
    assert step.evaluate(batch(0))[0].item() == want != other


def test_memory_that_others_hold_is_not_written():
    step = made()
    p = trained(step.model)[0]
    held, values = p.data, p.data.clone()
    p.data = p.data * 2
    given = p.data
    step([batch(0)], RATE)
    assert torch.equal(held, values)
    assert torch.equal(given, values * 2)
    assert not torch.equal(p.data, given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda state, name: {name: state[name].t().contiguous()},
            r" is torch.float32 \[32, 2\], wanted float32 \[2, 32\]",
        ),
        (
            lambda state, name: {name: torch.zeros(4, 32)},
            r" is torch.float32 \[4, 32\], wanted float32 \[2, 32\]",
        ),
        (lambda state, name: {name: state[name].reshape(-1)}, r" is torch.float32 \[64\], wanted"),
        (lambda state, name: {name: state[name].long()}, r" is torch.int64 \[2, 32\], wanted float32"),
        (lambda state, name: {"steps": torch.zeros(1)}, r"steps is torch.float32 \[1\], wanted float32 \[\]"),
        (lambda state, name: {"extra": torch.zeros(1)}, r"missing \[\], unexpected \['extra'\]"),
    ],
)
def test_a_state_of_another_shape_is_refused_by_name_and_leaves_all(change, told):
    step = made()
    step([batch(0)], RATE)
    state = step.state_dict()
    name = f"exp_avg.{step.state.names[0]}"
    with pytest.raises(ValueError, match=told):
        step.load_state_dict({key: value * 2 for key, value in state.items()} | change(state, name))
    assert all(torch.equal(value, step.state_dict()[key]) for key, value in state.items())


def test_a_parameter_of_another_dtype_is_named():
    step = made()
    step.model.to(torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"lora_A.default.weight is torch.bfloat16 \[2, 32\] on cpu now, the step"
    ):
        step([batch(0)], RATE)
    step.rebuild()
    step([batch(0)], RATE)


def test_a_base_that_becomes_float16_wants_a_scaled_loss():
    """TrainStep scales the loss of a model that is float16 when it is made."""
    step = made()
    step([batch(0)], RATE)
    cast_base(step.model, torch.float16)
    with pytest.raises(RuntimeError, match=r"embed_tokens.weight is float16 now.*step.rebuild\(\)"):
        step([batch(1)], RATE)
    assert step.state.steps == 1
    before = step.state.exp_avg.clone()
    step.rebuild()
    assert torch.equal(step.state.exp_avg, before)
    assert step.loss_scale is not None
    assert step([batch(1)], RATE).loss_scale == 2.0**16
    assert "loss_scale" in step.state_dict()


def test_a_loss_that_is_not_to_be_scaled_stays_so():
    step = TrainStep(build(), mode="eager", loss_scaling=False)
    step([batch(0)], RATE)
    cast_base(step.model, torch.float16)
    step([batch(1)], RATE)
    step.rebuild()
    assert step([batch(2)], RATE).loss_scale is None
