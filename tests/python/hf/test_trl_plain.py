"""TRL's other trainers over packed weights: the losses of plain TRL and PEFT on the dequantised model.

No line of ours is in the reference but the decoding: torch's attention, PEFT's layers, TRL's own head.
"""

import pytest
import torch

from support.trl_recipes import CHAT_ROWS, GRPO, LABELLED, PROMPTS, causal, classifier, run_script
from support.trl_runs import WORDS, make_folder

pytestmark = pytest.mark.slow
RUNS = {
    "kto": (LABELLED, {"beta": 0.5}, causal),
    "orpo": (CHAT_ROWS, {}, causal),
    "simpo": (CHAT_ROWS, {"loss_type": "simpo"}, causal),
    "reward_model": (CHAT_ROWS, {}, classifier),
    "grpo": ({"prompt": PROMPTS}, GRPO | {"per_device_train_batch_size": 16, "beta": 0.1}, causal),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


def dense(load):
    def dequantised(folder):
        model, task = load(folder)
        model.set_attn_implementation("sdpa")
        return model.dequantize(), task

    return dequantised


@pytest.mark.parametrize("kind", RUNS)
def test_losses_and_gradients_are_those_of_plain_trl(kind, folder, tmp_path):
    """A gradient near 0 that rounds to the other side is a step of AdamW to the other side."""
    rows, settings, load = RUNS[kind]
    settings = settings | {"max_steps": 3}
    settings.setdefault("learning_rate", 1e-3)
    ours = run_script(kind, folder, tmp_path, rows, load, **settings)
    want = run_script(kind, folder, tmp_path, rows, dense(load), optimized=False, **settings)
    assert len(ours) == len(want) == 3
    for step, (a, b) in enumerate(zip(ours, want, strict=True)):
        tolerance = 1e-5 if step == 0 else 2e-3
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance, abs=tolerance), step
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * tolerance), step
        for name in ("rewards/margins", "rewards/chosen", "accuracy", "reward", "kl", "entropy"):
            if name in b:
                assert a[name] == pytest.approx(b[name], rel=10 * tolerance, abs=1e-3), (step, name)
    assert torch.isfinite(torch.tensor([line["grad_norm"] for line in ours])).all()


@pytest.mark.parametrize("free", [{"padding_free": True}, {"packing": True}], ids=["padding_free", "packing"])
def test_rows_without_padding_have_the_losses_of_plain_trl(free, folder, tmp_path):
    """Documents of several lengths in one row; packing's reference packs too, padding_free's pads."""
    rows = {"text": [" ".join(WORDS[i : i + 5 + i]) for i in range(16)]}
    settings = {"max_steps": 3, "learning_rate": 1e-3, "max_length": 24 if "packing" in free else None}
    settings["pad_to_multiple_of"] = None
    ours = run_script("sft", folder, tmp_path, rows, **settings, **free)
    reference = settings | (free if "packing" in free else {})
    want = run_script("sft", folder, tmp_path, rows, dense(causal), optimized=False, **reference)
    for step, (a, b) in enumerate(zip(ours, want, strict=True)):
        tolerance = 1e-5 if step == 0 else 2e-3
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance), step
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * tolerance), step
