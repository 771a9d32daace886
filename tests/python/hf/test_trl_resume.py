"""A trainer of TRL with torch_compile and dropout resumes with the bits of an unbroken run."""

import pytest
import torch
import torch._dynamo

import monograph as mg
from support.trl_runs import make_folder, trainer_for

pytestmark = pytest.mark.slow


def test_a_compiled_run_with_dropout_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Inductor takes the seed of its masks from torch's generator, whose state the Trainer saves. The whole
    run meets steps 3 and 4 with the graph of step 1, the resumed one compiles at step 3."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments write it; undone after the test
    folder = make_folder(tmp_path, layers=1)

    def run(resume):
        torch._dynamo.reset()
        change = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
        model = mg.from_pretrained(folder, dtype=torch.float32)
        trainer = trainer_for("sft", model, tmp_path / "out", torch_compile=True, **change)
        for module in trainer.model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = torch.nn.Dropout(0.25)
        mg.optimize(trainer.model)
        losses, step = [], trainer.training_step
        trainer.training_step = lambda *a, **k: losses.append(step(*a, **k)) or losses[-1]
        trainer.train(resume_from_checkpoint=resume)
        assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
        return [loss.item() for loss in losses], dict(trainer.model.named_parameters())

    losses, trained = run(None)
    again, resumed = run(str(tmp_path / "out" / "checkpoint-2"))
    torch._dynamo.reset()
    assert again == losses[2:]
    assert len(set(losses)) == 4
    assert all(torch.equal(trained[name], parameter) for name, parameter in resumed.items())
