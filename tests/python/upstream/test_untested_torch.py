"""A torch that was never tested: the step runs in eager mode and says so in one line."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
import torch
from trl import SFTConfig

import monograph as mg
from monograph.recipe.config.keys import TrlRecipe
from monograph.recipe.config.trl_arguments import config_arguments, field_names
from monograph.training import TrainStep
from monograph.training.regions import region_layers
from monograph.upstream import tested_versions
from support.model_changes import batch, build

COMPILED = ("graph", "whole_step", "inductor", "inductor_whole_step", "per_layer")


@pytest.fixture
def torch_2_99(monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.99.0" if name == "torch" else own(name)
    )
    monkeypatch.delenv("MONOGRAPH_UNTESTED_TORCH", raising=False)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "2.99.0" in r.getMessage()]


@pytest.mark.parametrize("mode", COMPILED)
def test_every_compiled_mode_becomes_eager_and_one_line_says_so(
    torch_2_99: None, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    lowest, highest = (".".join(map(str, v)) for v in tested_versions.TRIED["torch"])
    with caplog.at_level(logging.WARNING, "monograph"):
        step = TrainStep(build(), mode=mode)
    assert step.mode == "eager"
    assert not region_layers(step.model)
    (line,) = said(caplog)
    for part in ("torch 2.99.0", f"{lowest} to {highest}", mode, "eager", "MONOGRAPH_UNTESTED_TORCH=1"):
        assert part in line
    assert "\n" not in line
    assert len(line) < 300


def test_the_step_trains_as_eager_mode_does(torch_2_99: None) -> None:
    steps = [TrainStep(build(), mode=mode) for mode in ("graph", "eager")]
    for seed in range(2):
        one, other = (step([batch(seed)], 1e-3) for step in steps)
        assert torch.equal(one.loss, other.loss)
    assert torch.equal(steps[0].state.flat, steps[1].state.flat)


def test_eager_mode_has_nothing_to_say(torch_2_99: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "monograph"):
        assert TrainStep(build(), mode="eager").mode == "eager"
    assert not said(caplog)


def test_optimize_makes_no_regions(torch_2_99: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "monograph"):
        made = mg.optimize(build(), regions=True)
    assert not region_layers(made)
    assert len(said(caplog)) == 1


def test_whoever_tests_a_new_torch_gets_the_mode(
    torch_2_99: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MONOGRAPH_UNTESTED_TORCH", "1")
    with caplog.at_level(logging.WARNING, "monograph"):
        step = TrainStep(build(), mode="graph")
    assert step.mode == "graph"
    assert region_layers(step.model)
    assert not said(caplog)


@pytest.mark.parametrize("found", ["2.11.0", "2.13.7+cpu", "2.15.0"])
def test_a_tested_torch_keeps_its_mode(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    own = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found if name == "torch" else own(name))
    monkeypatch.delenv("MONOGRAPH_UNTESTED_TORCH", raising=False)
    assert TrainStep(build(), mode="graph").mode == "graph"


def test_a_trainer_of_trl_does_not_compile(torch_2_99: None, caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("graph", "inductor"):
        recipe = TrlRecipe(base_model="any", datasets=[], output_dir="out", step_mode=mode)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "monograph"):
            given = config_arguments(recipe, field_names(SFTConfig))
        assert "torch_compile" not in given
        assert len(said(caplog)) == 1
