"""kill -9 at named points: the resumed run has every loss and every bit of the adapter of an unbroken one."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
POINTS = [
    "before backward",
    "after backward",
    "between update and save",
    "during save, files half written",
    "during save, before the rename",
    "during load",
]


def run(root, mode, points):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "support.interrupted_run", str(root), mode, *points],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory.mktemp("interrupted"), "eager", POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_it_gives_the_bits_of_an_unbroken_run(results, point):
    whole, killed = results["whole"], results[point]
    assert whole["exits"] == [0]
    assert killed["exits"] == [-9] * (2 if point == "during load" else 1) + [0]
    steps = [step for step, loss, _ in whole["trace"] if float.fromhex(loss)]
    assert steps == list(range(1, 7))  # every step once, none lost or seen twice
    assert killed["trace"] == whole["trace"]
    assert killed["adapter"] == whole["adapter"]


def test_what_a_killed_save_leaves_is_no_checkpoint(results):
    for point in POINTS[3:5]:
        left = results[point]["left"]
        assert ".unfinished-checkpoint-3" in left
        assert "checkpoint-3" not in left
        assert "checkpoint-2" in left


def test_the_losses_change_from_step_to_step(results):
    losses = [float.fromhex(loss) for _, loss, _ in results["whole"]["trace"]]
    assert len(set(losses)) > 4


@pytest.mark.long
def test_a_compiled_run_resumes_to_the_same_bits(tmp_path):
    results = run(tmp_path, "compiled", ["after backward"])
    whole, killed = results["whole"], results["after backward"]
    assert killed["exits"] == [-9, 0]
    assert killed["trace"] == whole["trace"]
    assert killed["adapter"] == whole["adapter"]
