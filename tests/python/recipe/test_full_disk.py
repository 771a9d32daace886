"""A disk that takes no file of some size, by the system itself: one line, exit code 5, no half checkpoint."""

import os
import resource
import signal
import subprocess
import sys

import pytest
import yaml

from support.recipe_files import make_instruction_world, small_recipe

pytestmark = pytest.mark.slow
# Bytes of a file. Data and metrics take less than the first, the adapter more; the moments more than both.
NO_ADAPTER, NO_MOMENTS = 200_000, 700_000
TRL = {"trainer": "trl", "step_mode": None, "sample_packing": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("disk"))


WAYS = {
    "alone": ({}, [], NO_ADAPTER),
    "two ranks": ({"gradient_accumulation_steps": 2}, ["--nproc-per-node", "2"], NO_MOMENTS),
    "trl": (TRL, [], NO_ADAPTER),
    "trl, optimizer": (TRL, [], NO_MOMENTS),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_that_does_not_fit(root, tmp_path, way):
    change, options, limit = WAYS[way]
    out = tmp_path / "out"
    keys = small_recipe(root, "instruction", output_dir=str(out), step_mode="eager", max_steps=2, lora_r=64)
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(keys | {"save_steps": 1} | change))

    def shrink():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "monograph", "train", str(tmp_path / "recipe.yml"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, preexec_fn=shrink
    )
    assert done.returncode == 5, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if "was not written: " in line and "rank 1" not in line]
    assert len(said) == 1, done.stderr[-3000:]
    why = "Input/output error" if way == "trl, optimizer" else "File too large"
    assert f"{out / 'checkpoint-1'} was not written: {why}; make room" in said[0]
    assert "Traceback" not in done.stderr
    assert not [path.name for path in out.iterdir() if "checkpoint" in path.name]
