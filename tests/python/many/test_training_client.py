"""Verbs on one base: gradients accumulate until optim_step; with the divisor of a mean, bits of TrainStep."""

import json
import os

import pytest
import torch

import monograph as mg
from monograph.training.loss import count_targets
from support.many_runs import base, batches, digest, lora, seven


def adam(run):
    return mg.AdamParams(run.learning_rate, run.betas, run.eps, run.weight_decay, run.max_grad_norm)


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_with_the_mean_as_divisor_it_has_the_bits_of_a_step(mode):
    runs = {name: seven()[name] for name in ("bias", "many")}
    service = mg.TrainingService(base(), mode=mode)
    clients = {
        name: service.create_lora_training_client(seed=run.seed, config=run.config, name=name)
        for name, run in runs.items()
    }
    step = mg.ManyStep(base(), runs, mode=mode)
    for number in range(2):
        wanted = step({name: batches(name, number) for name in runs})
        for name, run in runs.items():
            given = batches(name, number)
            targets = sum(map(count_targets, given))
            parts = [clients[name].forward_backward([one], divisor=targets) for one in given]
            assert sum(part.targets for part in parts) == targets
            assert clients[name].optim_step(adam(run)) == float(wanted[name].grad_norm)
            assert sum(part.loss for part in parts) == pytest.approx(float(wanted[name].loss), rel=1e-6)
    for name in runs:
        assert digest(clients[name]._step) == digest(step.step_of(name))


def test_the_loss_is_a_sum_and_calls_add_up():
    service = mg.TrainingService(base(), mode="eager")
    one, two = (service.create_lora_training_client(rank=4, seed=3) for _ in range(2))
    given = batches("many", 0)
    for batch in given:
        one.forward_backward([batch])
    whole = two.forward_backward(given)
    assert whole.loss == pytest.approx(two.forward(given).loss, rel=1e-3)
    assert whole.loss > 5 * whole.targets / 2  # about ln 256 for each target
    assert one.optim_step(mg.AdamParams(1e-3)) == two.optim_step(mg.AdamParams(1e-3))
    assert digest(one._step) == digest(two._step)
    with pytest.raises(ValueError, match="optim_step without a forward_backward"):
        one.optim_step(mg.AdamParams())


def test_what_is_saved_goes_on_as_if_nothing_had_been(tmp_path):
    service = mg.TrainingService(base(), mode="eager")
    one, two = (service.create_lora_training_client(rank=4, seed=seed) for seed in (3, 4))
    one.forward_backward(batches("odd", 0))
    with pytest.raises(ValueError, match="gradients have accumulated"):
        one.save_state(str(tmp_path / "state"))
    one.optim_step(mg.AdamParams(1e-3))
    one.save_state(str(tmp_path / "state"))
    one.save_state(str(tmp_path / "state"))  # in place of the older one
    one.save_weights(str(tmp_path / "weights"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "weights"]
    two.load_state(str(tmp_path / "state"))
    for client in (one, two):
        client.forward_backward(batches("odd", 1))
        client.optim_step(mg.AdamParams(1e-3))
    assert digest(one._step) == digest(two._step)
    with pytest.raises(ValueError, match=r"weights has no optimizer\.safetensors"):
        two.load_state(str(tmp_path / "weights"))
    other = service.create_lora_training_client(config=lora(4, lora_alpha=64))
    with pytest.raises(ValueError, match="state has lora_alpha 4, wanted 64 as adapter-3"):
        other.load_state(str(tmp_path / "state"))
    before = digest(two._step)
    (tmp_path / "state" / "optimizer.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is broken"):
        two.load_state(str(tmp_path / "state"))
    (tmp_path / "state" / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"state has no adapter_config\.json"):  # and no Hub is asked
        two.load_state(str(tmp_path / "state"))
    assert digest(two._step) == before
    (tmp_path / "weights" / "checkpoint-3").mkdir()  # the folder of a run
    with pytest.raises(ValueError, match="holds something else than an adapter, checkpoint-3"):
        two.save_weights(str(tmp_path / "weights"))
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match="holds something else than an adapter"):
        two.save_weights(str(tmp_path / "papers"))
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "years"


def test_samples_follow_the_seed_and_leave_training_alone():
    service = mg.TrainingService(base(), mode="eager")
    one, two = (service.create_lora_training_client(config=lora(4, 0.1), seed=3) for _ in range(2))
    state = torch.get_rng_state()
    first = one.sample([1, 2, 3], max_tokens=6, num_samples=2, seed=1)
    assert [len(row) for row in first] == [6, 6]
    assert one.sample([1, 2, 3], max_tokens=6, num_samples=2, seed=1) == first
    greedy = one.sample([1, 2, 3], max_tokens=6, temperature=0)
    assert greedy == two.sample([1, 2, 3], max_tokens=6, temperature=0)
    assert torch.equal(torch.get_rng_state(), state)
    for client in (one, two):
        client.forward_backward(batches("norm", 0))
        client.optim_step(mg.AdamParams(1e-2))
    assert digest(one._step) == digest(two._step)


def test_a_closed_client_reaches_no_other_adapter():
    service = mg.TrainingService(base(), mode="eager")
    one = service.create_lora_training_client(rank=4, name="law")
    one.forward_backward(batches("norm", 0))
    one.close()
    two = service.create_lora_training_client(rank=4, name="law")  # in the same place
    before = digest(two._step)
    calls = [
        lambda: one.forward_backward(batches("norm", 0)),
        lambda: one.forward(batches("norm", 0)),
        lambda: one.optim_step(mg.AdamParams()),
        lambda: one.sample([1]),
        lambda: one.save_state("law"),
        lambda: one.load_state("law"),
        one.close,
        lambda: one.model,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="law is closed, wanted a client that is open"):
            call()
    assert digest(two._step) == before


def test_arguments_that_are_wrong_are_named_and_nothing_is_lost():
    service = mg.TrainingService(base(), mode="eager")
    for given, message in [
        ({"rank": 0}, "rank is 0, wanted a whole number"),
        ({"rank": True}, "rank is True"),
        ({"name": 5}, "name is 5, wanted a word"),
        ({"seed": None}, "seed is None"),
        ({"config": "r=4"}, "config is a str, wanted a LoraConfig"),
    ]:
        with pytest.raises(ValueError, match=message):
            service.create_lora_training_client(**given)
    client = service.create_lora_training_client(rank=4)
    client.forward_backward(batches("norm", 0))
    for params, message in [
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        ({"eps": -1}, "eps is -1"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"grad_clip_norm": -1}, "grad_clip_norm is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            client.optim_step(mg.AdamParams(**params))
    for divisor in (0, -1, float("nan"), "x"):
        with pytest.raises(ValueError, match=r"divisor is .*, wanted a number, above 0"):
            client.forward_backward(batches("norm", 0), divisor=divisor)
    with pytest.raises(ValueError, match="its micro-batches are or have a dict"):
        client.forward_backward(batches("norm", 0)[0])
    for prompt, given, message in [
        ([], {}, r"prompt is \[\], wanted one token or more, each from 0 to 255"),
        ([256], {}, r"prompt is \[256\]"),
        ("ab", {}, "prompt is"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"num_samples": 1.5}, "num_samples is 1.5"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 2}, "top_p is 2, wanted 1 at most"),
    ]:
        with pytest.raises(ValueError, match=message):
            client.sample(prompt, **given)
    with pytest.raises(ValueError, match="gradients have accumulated"):  # they are still there
        client.save_state("")
    assert client.optim_step(mg.AdamParams()) > 0
    with pytest.raises(ValueError, match="the folder is '', wanted a path"):
        client.save_state("")


def test_modes_and_models_that_have_no_such_step_are_named():
    with pytest.raises(ValueError, match="mode is 'whole_step', wanted graph, inductor or eager"):
        mg.TrainingService(base(), mode="whole_step")
    routed = base()
    routed.config.output_router_logits = True
    with pytest.raises(ValueError, match="the loss of routers is no sum over targets"):
        mg.TrainingService(routed)


def test_the_file_of_the_next_in_a_place_says_how_it_began(tmp_path):
    service = mg.TrainingService(base(), mode="eager")
    service.create_lora_training_client(config=lora(4, lora_alpha=4), seed=3).close()
    second = service.create_lora_training_client(
        config=lora(4, lora_alpha=4, init_lora_weights="gaussian"), seed=4
    )
    second.save_weights(str(tmp_path / "second"))
    written = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert written["init_lora_weights"] == "gaussian"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, wanted a folder"):
        second.save_weights(str(tmp_path / "file"))


def test_a_save_that_is_cut_off_leaves_one_whole(tmp_path, monkeypatch):
    service = mg.TrainingService(base(), mode="eager")
    client = service.create_lora_training_client(rank=4, seed=3)
    client.save_weights(str(tmp_path / "out"))
    first = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    client.forward_backward(batches("norm", 0))
    client.optim_step(mg.AdamParams(1e-2))
    rename, left = os.rename, [1, 0]

    def cut(source, target):
        if not left.pop():
            raise OSError("cut off")
        rename(source, target)

    monkeypatch.setattr(os, "rename", cut)
    with pytest.raises(OSError, match="cut off"):
        client.save_weights(str(tmp_path / "out"))
    left[:] = [0, 1]
    with pytest.raises(OSError, match="cut off"):
        client.save_weights(str(tmp_path / "out"))
    monkeypatch.undo()
    whole = [p for p in tmp_path.iterdir() if (p / "adapter_model.safetensors").exists()]
    assert first in [(p / "adapter_model.safetensors").read_bytes() for p in whole]
    client.save_weights(str(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() != first
