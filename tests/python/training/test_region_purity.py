"""Layers whose Python code has state or reads what others change: the bits of eager mode, or a refusal."""

import logging
import random
import re

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from monograph.training import TrainStep
from monograph.training.regions import TRACES, forget, make_regions, registry
from support.odd_layers import FEATURES, OddModel, reset, run
from support.region_models import build, steps_equal

HELD = [name for name, feature in FEATURES.items() if not feature.refused]
REFUSED = [name for name, feature in FEATURES.items() if feature.refused]
STEPS = 4


class Counting(LlamaDecoderLayer):
    def forward(self, hidden_states, **options):
        self.calls += 1
        return super().forward(hidden_states, **options) * (1 + self.calls)


@pytest.fixture(autouse=True)
def fresh():
    forget()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", HELD)
def test_what_is_read_is_read_at_each_call(name):
    changed = [[name]] * (STEPS - 1)
    assert run([name], True, changed) == run([name], False, changed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_assigned_or_drawn_is_refused_by_name(name):
    """And nothing stays of the attempt: a second one is refused in the same words."""
    found = [run([name], True, [])[-1] for _ in range(2)]
    for text in found:
        assert re.search(
            rf"^region layers\.0#\d+ \(OddLayer\) cannot be traced: .*{FEATURES[name].refused}", text
        )
    assert len({text.split("(", 1)[1] for text in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_any_mixture_has_the_bits_of_eager_mode_or_is_refused(seed):
    drawn = random.Random(seed)
    pool = HELD if seed % 3 else [*HELD, *REFUSED]
    names = drawn.sample(pool, drawn.randint(1, 5))
    changed = [drawn.sample(names, drawn.randint(0, len(names))) for _ in range(STEPS)]
    checkpointing = bool(seed % 2)
    found, wanted = run(names, True, changed, checkpointing), run(names, False, changed, checkpointing)
    if isinstance(found[-1], str):
        assert any(FEATURES[name].refused for name in names), (names, found[-1])
        assert re.match(r"region layers\.\d#\d+", found.pop())
    assert found == wanted[: len(found)], names


def test_each_change_of_what_is_read_is_told_and_ends_in_a_refusal(caplog, monkeypatch):
    monkeypatch.setattr(registry, "MOST_CHANGES", 2)
    with caplog.at_level(logging.WARNING, logger="monograph"):
        *found, refusal = run(["config"], True, [["config"], ["config"]])
    assert re.search(r"layers\.0#\d+ is traced anew: config\.gain is 1\.5, was 1\.0", caplog.text)
    assert len(found) == 2
    assert re.match(
        r"region layers\.0#\d+: what it reads changed 2 times, at last: config\.gain is 2", refusal
    )


@pytest.mark.slow
@pytest.mark.parametrize("gains", [(1.0, 2.0, 1.0), (2.0, 1.0, 2.0)])
def test_a_compiled_graph_sees_a_change_or_names_the_region(gains):
    """The trace for 2.0 keeps more for backward than that for 1.0."""
    found = []
    for regions in (False, True):
        reset()
        model = OddModel(["branch"], layers=1)
        if regions:
            make_regions(model)
        run_once = torch.compile(model, backend="aot_eager", fullgraph=True) if regions else model
        results = []
        for gain in gains:
            model.config.gain = gain
            loss = run_once(torch.ones(2, 3, 8))
            try:
                loss.backward()
            except RuntimeError as error:
                results.append(str(error))
                continue
            results.append([loss.item(), *(p.grad.tolist() for p in model.parameters())])
            model.zero_grad()
        found.append(results)
    plain, got = found
    refused = [one for one in got if isinstance(one, str)]
    assert len(refused) == (gains[0] == 1.0)  # the second of three
    for text in refused:
        assert re.match(r"region layers\.0#\d+: it changed after the step was compiled, and backward", text)
    assert all(one in (wanted, *refused) for one, wanted in zip(got, plain, strict=True))


def test_what_nobody_reads_may_change():
    """A trace is for all values of what a layer's code does not name."""
    run(["unread"], True, [["unread"]] * 3)
    assert TRACES.graphs == 2 * TRACES.signatures


@pytest.mark.slow
def test_a_step_computes_what_is_refused_by_its_own_code(caplog):
    steps = {}
    for mode in ("graph", "eager"):
        model = build(2)
        for layer in model.get_base_model().model.layers:
            layer.__class__, layer.calls = Counting, 0
        steps[mode] = TrainStep(model, mode=mode)
    with caplog.at_level(logging.WARNING, logger="monograph"):
        steps_equal(steps["graph"], steps["eager"])
    assert "(Counting) cannot be regions: it assigns the layer.calls" in caplog.text
    for step in steps.values():
        assert [layer.calls for layer in step.model.get_base_model().model.layers] == [2, 2]
