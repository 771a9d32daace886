"""A recipe on 1 to 4 ranks: one adapter and one list of losses; who writes, who says what, how it ends."""

import os
import subprocess
import sys

import pytest

from support.native_tool import program as native_program
from support.rank_runs import MICRO_BATCHES, STEPS, Runs, results_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(root):
    return results_of(root, "over_ranks")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_gives_the_bits_of_one(results, ranks):
    one, several = results["on 1"], results[f"on {ranks}"]
    assert one["exits"] == [[0]]
    assert several["exits"] == [[0] * ranks]
    steps = [step for step, loss, _ in one["trace"] if float.fromhex(loss)]
    assert steps == list(range(1, STEPS + 1))
    assert len(set(one["tokens"])) > 1
    assert min(one["tokens"]) < max(one["tokens"]) / 2  # the end of an epoch has fewer micro-batches
    for name in ("trace", "adapter", "tokens"):
        assert several[name] == one[name]
    assert several["dealt"] == ""  # every micro-batch was computed once in each step


def test_rank_0_writes_and_the_others_are_silent(results):
    first, *others = results["on 4"]["errors"][0]
    assert f"{STEPS} steps, batch size 1, accumulation {MICRO_BATCHES}, mode eager; 4 ranks" in first
    assert others == ["", "", ""]


def test_sigterm_on_one_rank_saves_and_ends_all(results):
    ended, resumed = results["ended"], results["resumed"]
    assert ended["exits"] == [[143, 143]]
    assert "checkpoint-3" in ended["left"]
    assert "stopped after step 3" in ended["errors"][0][0]
    assert resumed["exits"] == [[0, 0, 0]]
    for name in ("trace", "adapter"):
        assert resumed[name] == results["on 1"][name]


def test_ranks_without_a_micro_batch_are_told_and_change_nothing(results):
    one, three = results["idle on 1"], results["idle on 3"]
    told = "gradient_accumulation_steps is 2, on 3 ranks: 1 of them have no micro-batch in a step (0)"
    assert three["errors"][0][0].count(told) == 1
    assert "mode graph" in three["errors"][0][0]
    assert three["exits"] == [[0, 0, 0]]
    for name in ("trace", "adapter", "tokens"):
        assert three[name] == one[name]


def test_the_rank_that_failed_first_is_named_by_all(results):
    (first, last), (code, last_code) = results["raised"]["errors"][0], results["raised"]["exits"][0]
    assert last == "rank 1 of 2: error: ValueError: wanted by the test\n"
    assert first.splitlines()[-1] == (
        "rank 0 of 2: ended because rank 1 failed first: ValueError: wanted by the test"
    )
    assert (code, last_code) == (1, 3)


def test_another_number_of_virtual_shards_is_another_run(results):
    (error,) = results["another run"]["errors"][0]
    assert results["another run"]["exits"] == [[3]]
    assert "virtual_shards is 2, the run of" in error
    assert f"has {MICRO_BATCHES}; write that" in error


def start(command, **env):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.long
def test_torchrun_restarts_a_killed_rank_and_the_run_goes_on(root, results):
    """By the program itself: its store keeps the addresses of dead processes from start to start."""
    runs = Runs(root, None)
    recipe = runs.recipe("torchrun")
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    program = ["-m", "support.rank_program", "train", recipe]
    done = start(
        [sys.executable, "-m", "torch.distributed.run", *launcher, *program],
        MONOGRAPH_TEST_KILL="after backward:-1:4",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed from {root}/torchrun/checkpoint-3; 2 ranks" in done.stderr
    assert "rank 1 of 2 was lost in the sum of step 4: last seen" in done.stderr
    left = runs.left("torchrun")
    for name in ("trace", "adapter"):
        assert left[name] == results["on 1"][name]


def test_the_command_starts_its_own_ranks(root, results):
    """`monograph train --nproc-per-node 2`, the native program first; exit codes are those of the ranks."""
    runs = Runs(root, None)
    python, tool = {"MONOGRAPH_PYTHON": sys.executable}, str(native_program())
    command = [tool, "train", runs.recipe("command"), "--nproc-per-node"]
    done = start([*command, "2", "--max-steps", "2"], **python)
    assert done.returncode == 0, done.stderr[-3000:]
    assert runs.left("command")["trace"] == results["on 1"]["trace"][:2]
    wrong = start([*command, "none"], **python)
    assert wrong.returncode == 2
    assert "--nproc-per-node is none, wanted a number of processes, 1 or more" in wrong.stderr
