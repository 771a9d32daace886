"""One run at a time in output_dir; a second one keeps its own checkpoints, and says what it replaces."""

import os
import subprocess
import sys

import pytest

from monograph.recipe import check_keys
from monograph.recipe.run.output_folder import held, set_aside
from monograph.recipe.train import train
from support.recipe_files import make_instruction_world, small_recipe

HOLDER = """
import sys
from monograph.recipe.run.output_folder import held
with held(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("folders"))


def go(root, out, **keys):
    base = {"step_mode": "eager", "save_total_limit": 1, "num_epochs": 9, "output_dir": str(out)}
    return train(check_keys(small_recipe(root, "instruction", **(base | keys))).recipe)


def saved(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))


TRL = {"trainer": "trl", "sample_packing": False, "step_mode": None}


@pytest.mark.parametrize("engine", [{}, TRL], ids=["own", "trl"])
def test_a_fresh_run_keeps_its_own_checkpoints(root, tmp_path, engine, capfd):
    out = tmp_path / "out"
    go(root, out, max_steps=6, save_steps=3, **engine)
    assert saved(out) == ["checkpoint-6"]
    go(root, out, max_steps=4, save_steps=2, seed=7, **engine)
    assert saved(out) == ["checkpoint-4"]
    assert saved(out / "earlier-1") == ["checkpoint-6"]
    told = "".join(capfd.readouterr())
    assert "holds the adapter of an earlier run; the end of this one replaces it" in told
    assert f"checkpoint-6 of an earlier run: moved into {out / 'earlier-1'}" in told


def test_auto_goes_on_with_the_last_run(root, tmp_path):
    out = tmp_path / "out"
    go(root, out, max_steps=6, save_steps=3)
    go(root, out, max_steps=4, save_steps=2, seed=7)
    assert go(root, out, max_steps=5, seed=7, resume_from_checkpoint="auto").step == 5  # of seed 42 it raises
    assert saved(out) == ["checkpoint-5"]


def test_going_back_sets_aside_what_came_after(root, tmp_path):
    out = tmp_path / "out"
    go(root, out, max_steps=6, save_steps=2, save_total_limit=3)
    back = str(out / "checkpoint-2")
    go(root, out, max_steps=4, save_steps=2, save_total_limit=3, resume_from_checkpoint=back)
    assert saved(out) == ["checkpoint-2", "checkpoint-4"]
    assert saved(out / "earlier-1") == ["checkpoint-4", "checkpoint-6"]


def test_a_run_that_came_from_another_folder_owns_nothing_here(tmp_path):
    for name in ("out/checkpoint-2", "out/checkpoint-6", "from/checkpoint-4"):
        (tmp_path / name).mkdir(parents=True)
    out = str(tmp_path / "out")
    set_aside(out, str(tmp_path / "from" / "checkpoint-4"), 4)
    assert saved(out) == []
    (tmp_path / "out" / "checkpoint-8").mkdir()
    set_aside(out, None, 0)
    assert saved(tmp_path / "out" / "earlier-2") == ["checkpoint-8"]


@pytest.mark.parametrize("engine", [{}, TRL], ids=["own", "trl"])
@pytest.mark.parametrize("wanted", ["auto", True])
def test_auto_without_a_checkpoint_is_refused(root, tmp_path, engine, wanted):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="has no checkpoint; leave it out to begin anew"):
        go(root, out, max_steps=1, resume_from_checkpoint=wanted, **engine)
    assert go(root, out, max_steps=1, auto_resume_from_checkpoints=True, **engine).step == 1


@pytest.mark.parametrize("engine", [{}, TRL], ids=["own", "trl"])
def test_a_run_that_never_began_leaves_no_folder(root, tmp_path, engine):
    """Data that are not there are found when output_dir is held already."""
    missing = [{"path": str(root / "none.jsonl"), "type": "instruction"}]
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        go(root, tmp_path / "new" / "out", max_steps=1, datasets=missing, **engine)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        go(root, tmp_path / "old", max_steps=1, datasets=missing, **engine)
    assert (tmp_path / "old").exists()


@pytest.mark.parametrize("engine", [{}, TRL], ids=["own", "trl"])
def test_a_second_run_at_the_same_time_is_refused(root, tmp_path, engine):
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"another run writes into .*process {other.pid} on"):
            go(root, out, max_steps=1, **engine)
        other.kill()  # a killed run leaves its file, and no lock
        other.wait()
    assert go(root, out, max_steps=1, **engine).step == 1
    assert not [name for name in os.listdir(out) if name.endswith(".lock")]


def test_the_folder_is_free_again_after_an_error(tmp_path):
    out = str(tmp_path / "out")
    with pytest.raises(KeyError), held(out):
        raise KeyError
    with held(out), pytest.raises(ValueError, match="another run"), held(out):
        pass
