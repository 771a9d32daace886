"""tools/axolotl_examples.py counts what is accepted and refused of a folder of recipes."""

import pathlib
import subprocess
import sys

import yaml

TOOL = pathlib.Path(__file__).parents[3] / "tools" / "axolotl_examples.py"
GOOD = {
    "base_model": "org/model",
    "adapter": "qlora",
    "lora_target_linear": True,
    "datasets": [{"path": "org/data", "type": "alpaca"}],
}


def test_accepted_and_refused_files_are_counted_once(tmp_path):
    files = {
        "good.yml": GOOD,
        "noticed.yaml": GOOD | {"trust_remote_code": True, "deepspeed": "zero2.json", "warmup_steps": 0.1},
        "bits.yml": GOOD | {"adapter": "lora", "load_in_8bit": True},
        "image.yml": GOOD | {"skip_prepare_dataset": True},
        "full.yml": {name: value for name, value in GOOD.items() if name != "adapter"},
        "cloud.yml": {"provider": "somebody"},
    }
    root = tmp_path / "examples" / "inner"
    root.mkdir(parents=True)
    for name, keys in files.items():
        (root / name).write_text(yaml.safe_dump(keys))
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "5 training examples, 4 with adapter lora or qlora" in done.stdout
    assert "| **accepted** | **3 of 4** | |" in done.stdout
    assert "| images and sound | 1 |" in done.stdout
    assert "| **accepted** | **0 of 1** | |" in done.stdout
    assert "| full fine-tuning | 1 |" in done.stdout
    wrong = subprocess.run(
        [sys.executable, str(TOOL), str(root)], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
