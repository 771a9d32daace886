"""Adapters of one recipe, trained together: each folder has the bytes that `--only NAME` gives."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from monograph.__main__ import main
from monograph.recipe.run.checkpoint import checkpoints
from support.recipe_files import make_instruction_world, small_recipe

pytestmark = pytest.mark.slow
ADAPTERS = [
    {"name": "norm", "lora_r": 8, "lora_dropout": 0.1},
    {"name": "bias", "lora_r": 1, "learning_rate": 0.02, "seed": 7, "lr_scheduler": "linear"},
    {
        "name": "dora",
        "lora_r": 12,
        "peft_use_dora": True,
        "gradient_accumulation_steps": 2,
        "lora_dropout": 0.2,
    },
    {
        "name": "wide",
        "lora_r": 33,
        "weight_decay": 0.1,
        "max_steps": 5,
        "sequence_len": 48,
        "max_grad_norm": 0.05,
    },
]
CLOCK = ("tokens_per_second", "memory_gib")  # time, speed and memory: those of the process


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("many"))


def write(world, folder, **keys):
    """A recipe that writes to world/folder; gives its path."""
    given = {"max_steps": 4, "val_set_size": 6, "eval_steps": 2, "save_steps": 2, "step_mode": "eager"}
    path = world / f"{folder}.yml"
    path.write_text(
        yaml.safe_dump(small_recipe(world, "instruction", output_dir=str(world / folder)) | given | keys)
    )
    return str(path)


def contents(folder: pathlib.Path):
    """All files below a folder by name; metrics without what a clock says, plots left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]
        elif path.is_file() and path.suffix != ".png":
            found[name] = path.read_bytes()
    return found


def check_each_alone(world, recipe, folder, names):
    """`--only` writes into the same folders: what was trained together is moved away before."""
    together = world / f"{folder}-together"
    shutil.move(world / folder, together)
    for name in names:
        assert main(["train", recipe, "--only", name, "--quiet"]) == 0
        alone, found = contents(world / folder / name), contents(together / name)
        assert list(found) == list(alone)
        different = [file for file in alone if found[file] != alone[file]]
        assert different == []
        assert "adapter_model.safetensors" in alone
        assert "monograph.json" in alone
        assert "checkpoint-4/optimizer.safetensors" in alone


@pytest.mark.parametrize(
    ("folder", "keys"),
    [
        ("eager", {}),
        pytest.param(
            "checkpointed", {"gradient_checkpointing": True, "step_mode": "graph"}, marks=pytest.mark.long
        ),
        pytest.param("graph", {"step_mode": "graph"}, marks=pytest.mark.long),
        pytest.param(
            "whole",
            {"step_mode": "whole_step", "adapters": [a for a in ADAPTERS if a["name"] != "dora"]},
            marks=pytest.mark.long,
        ),
    ],
)
def test_every_folder_is_that_of_the_adapter_alone(world, folder, keys, capsys):
    recipe = (
        write(world, folder, adapters=ADAPTERS, **keys)
        if not keys.get("adapters")
        else write(world, folder, **keys)
    )
    names = [entry["name"] for entry in keys.get("adapters", ADAPTERS)]
    assert main(["train", recipe]) == 0
    said = capsys.readouterr().err
    for name in names:
        assert f"{name}: adapter in " in said
    assert (world / folder / "losses.png").is_file()
    assert json.loads((world / folder / "adapters.json").read_text())["adapters"] == dict.fromkeys(
        names, "done"
    )
    saved = yaml.safe_load((world / folder / names[0] / "recipe.yml").read_text())
    assert "adapters" not in saved
    assert saved["output_dir"] == str(world / folder / names[0])
    check_each_alone(world, recipe, folder, names)


def test_killed_and_resumed_in_other_company_each_goes_on_from_its_own_checkpoint(world):
    """A run that is killed while `bias` saves its second checkpoint: `norm` has two, the others one."""
    recipe = write(world, "killed", adapters=ADAPTERS)
    program = (
        "import os, signal, sys\n"
        "from monograph.__main__ import main\n"
        "import monograph.recipe.run.checkpoint as c\n"
        "flush = c.flush\n"
        "def die(path):\n"
        "    if 'bias' in path and 'checkpoint-4' in path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    flush(path)\n"
        "c.flush = die\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, "train", recipe, "--quiet"], check=False)
    assert killed.returncode == -signal.SIGKILL
    found = {entry["name"]: list(checkpoints(str(world / "killed" / entry["name"]))) for entry in ADAPTERS}
    assert found == {"norm": [2, 4], "bias": [2], "dora": [2], "wide": [2]}
    assert not os.path.exists(world / "killed" / "norm" / "adapter_config.json")
    # In other company, and another order: `norm` rests, `tax` begins; then `norm` goes on without the others.
    tax = {"name": "tax", "lora_r": 4, "lora_dropout": 0.1, "seed": 3}
    company = write(world, "killed", adapters=[ADAPTERS[3], tax, ADAPTERS[1], ADAPTERS[2]])
    assert main(["train", company, "--resume-from-checkpoint", "auto", "--quiet"]) == 0
    recipe = write(world, "killed", adapters=[ADAPTERS[0], tax, *ADAPTERS[1:]])
    assert main(["train", recipe, "--only", "norm", "--resume-from-checkpoint", "auto", "--quiet"]) == 0
    for folder in (world / "killed").glob("*/earlier-*"):
        shutil.rmtree(folder)
    check_each_alone(world, recipe, "killed", ["tax", *(entry["name"] for entry in ADAPTERS)])


def test_a_killed_run_begins_those_that_had_no_checkpoint(world):
    recipe = write(world, "begun", adapters=ADAPTERS[:2], max_steps=2, save_steps=1)
    assert main(["train", recipe, "--only", "norm", "--quiet"]) == 0
    assert main(["train", recipe, "--resume-from-checkpoint", "auto", "--quiet"]) == 0
    assert list(checkpoints(str(world / "begun" / "bias"))) == [1, 2]
    assert (
        main(["train", write(world, "nobody", adapters=ADAPTERS[:2]), "--resume-from-checkpoint", "auto"])
        == 3
    )


def test_an_adapter_that_diverges_ends_no_other(world, capsys):
    """A rate of 1e30 makes every step behind the first one not finite: three of them end that run."""
    wild = {"name": "wild", "learning_rate": 1e30, "lora_r": 4, "lr_scheduler": "constant", "max_steps": 8}
    recipe = write(world, "wild", adapters=[wild, *ADAPTERS[:2]])
    assert main(["train", recipe]) == 3
    said = capsys.readouterr().err
    assert "error: adapter wild: steps 2 to 4 had a loss or gradient that is not finite" in said
    assert json.loads((world / "wild" / "adapters.json").read_text())["adapters"]["wild"] == "failed"
    check_each_alone(world, recipe, "wild", ["norm", "bias"])


def test_a_sweep_ends_all_but_the_best_and_reports_them_in_order(world, capsys):
    grid = {"learning_rate": ["1e-2", 1e-6], "lora_r": [2, 4]}
    recipe = write(world, "sweep", sweep=grid, sweep_stop={"after": 2, "keep": 2})
    assert main(["train", recipe]) == 0
    said = capsys.readouterr().err
    assert "sweep_stop: by eval_loss at step 2 go on: " in said
    assert main(["sweep-report", str(world / "sweep"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["adapters"]
    assert [row["name"][:6] for row in rows] == ["lr0.01", "lr0.01", "lr1e-6", "lr1e-6"]
    assert [row["step"] for row in rows] == [4, 4, 2, 2]
    assert rows[0]["eval_loss"] <= rows[1]["eval_loss"]
    assert rows[3]["state"] == "ended by sweep_stop at step 2"
    assert {row["name"] for row in rows} == {
        f"lr{rate}-r{rank}" for rate in ("0.01", "1e-6") for rank in (2, 4)
    }
    for name in ("lr0.01-r2", "lr1e-6-r4"):
        assert (world / "sweep" / name / "adapter_model.safetensors").is_file()
    before = contents(world / "sweep")
    assert (
        main(["train", recipe, "--resume-from-checkpoint", "auto", "--quiet"]) == 0
    )  # all are at their ends
    assert contents(world / "sweep") == before
    assert main(["sweep-report", str(world / "sweep")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["adapter", "steps", "loss", "eval_loss", "at", "step", "skipped"]
    assert main(["sweep-report", str(world / "model")]) == 3


@pytest.mark.long
def test_on_two_and_three_ranks_every_adapter_and_the_choice_of_a_sweep_are_those_of_one(world):
    stop = {"sweep_stop": {"after": 2, "keep": 1}, "gradient_accumulation_steps": 2}
    found = []
    several = [(name, ["--nproc-per-node", str(ranks)]) for name, ranks in (("two", 2), ("three", 3))]
    for folder, ranks in [("one", []), *several]:
        recipe = write(world, folder, adapters=ADAPTERS[:2], **stop)
        command = [sys.executable, "-m", "monograph", "train", recipe, "--quiet", *ranks]
        assert subprocess.run(command, check=False).returncode == 0
        files = contents(world / folder)
        found.append({name: files[name] for name in files if name.endswith(("safetensors", "adapters.json"))})
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 6
