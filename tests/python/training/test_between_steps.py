"""docs/reference/training.md, "What you may do between two steps": every cell is run, none is silent.

The tables are written, with `PYTHONPATH=python:tests/python`, by `python -m support.between_steps`,
`support.step_settings` and `support.killed_between_steps`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch._dynamo

from support.between_steps import MODES, PAGE, REFUSALS, SAME, Plain, Setting, of_mode, outcomes, page
from support.model_changes import ROWS, batch, build
from support.run_ranks import run_ranks
from support.step_settings import SETTINGS, line

pytestmark = pytest.mark.apart
# Losses near 4 and adapters: eight units in the last place of such a loss. Where the base is 16-bit, Inductor
# leaves roundings out, and the loss of a model that computes in float32 is as near.
ROUNDING = 2.0**-18
# Rows that move the losses of two steps by little: other arithmetic, roundings of casts, small steps.
NEAR = {
    '`set_attn_implementation("eager")`',
    "`merge_adapter()` and `unmerge_adapter()`",
    "`model.to(torch.bfloat16).to(torch.float32)`",
    "`model.half().float()`",
    "all but the adapters to bfloat16",
    "the same and back",
    "a second `TrainStep` on the model, which makes a step",
    "a buffer written in place (`rotary_emb.inv_freq`)",
    "a gradient hook of a parameter (`p.register_hook`)",
}
PARTS = 4  # of the rows, where code is generated for them
SIXTEEN_BIT = ("all but the adapters to bfloat16",)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_page_has_every_row_and_no_silent_cell():
    told = page()
    assert list(told) == list(MODES)
    for cells in told.values():
        assert list(cells) == list(ROWS)
        assert set(cells.values()) <= {SAME, *REFUSALS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_cell_is_what_the_page_says(mode):
    assert outcomes(of_mode(mode)) == page()[mode]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_rows_through_other_models_dtypes_and_memory(name):
    setting = SETTINGS[name]
    usual = page()["graph" if setting.mode == "per_layer" else setting.mode]
    assert line(name, outcomes(setting), usual) in PAGE.read_text(encoding="utf-8").split("\n")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", ["inductor", "per_layer"])
def test_with_inductors_code_every_cell_is_as_near_as_its_rounding(mode, part):
    """A change that a graph does not see is farther off: the test below."""
    rows = sorted(ROWS, key=lambda text: str(ROWS[text][1]))  # those of one model side by side
    rows = rows[part * len(rows) // PARTS : (part + 1) * len(rows) // PARTS]
    exact = [text for text in rows if text not in SIXTEEN_BIT]
    found = outcomes(Setting(mode, off_by=ROUNDING), exact)
    if cast := [text for text in rows if text in SIXTEEN_BIT]:
        found |= outcomes(Setting(mode, off_by=2.0**-6), cast)
    assert found == {text: page()["inductor"][text] for text in found}
    assert len(found) == len(rows)


@pytest.mark.slow
def test_a_change_that_is_not_seen_is_far_off():
    """Two steps of plain PyTorch with a change and without: no effect hides in rounding."""
    far = {}
    for text, (change, built) in ROWS.items():
        if page()["inductor"][text] != SAME:
            continue
        losses = []
        for changed in (True, False):
            model = build(**built)
            plain = Plain(model)
            plain([batch(1)])
            for turn in (1, 2):
                if changed:
                    change(model, turn, lambda model=model: Plain(model))
                losses.append(plain([batch(turn)]))
        far[text] = max(abs(one - other) for one, other in zip(losses[:2], losses[2:], strict=True))
    small = {text: off for text, off in far.items() if 0 < off < 64 * ROUNDING}
    assert set(small) <= NEAR, small
    assert sum(off > 0 for off in far.values()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("when", range(2))
@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.long)])
def test_killed_runs_go_on_with_the_bits_of_unbroken_ones(mode, when):
    """In a process of its own: it forks."""
    command = [sys.executable, "-m", "support.killed_between_steps", mode, str(when)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = PAGE.read_text(encoding="utf-8").split("\n")
    lines = done.stdout.strip().split("\n")
    assert len(lines) == 1
    assert lines[0] in told


@pytest.mark.slow
def test_the_same_change_on_all_ranks_of_a_mesh():
    ranks = run_ranks(4, "support/mesh_between_steps:on_all", "eager", timeout=900)
    assert all(cells == ranks[0] for cells in ranks)
    told = line("a mesh of 2 x 2 ranks", ranks[0], page()["eager"])
    assert told in PAGE.read_text(encoding="utf-8").split("\n")


@pytest.mark.slow
def test_a_change_on_one_rank_alone():
    first, second = run_ranks(2, "support/mesh_between_steps:on_one", timeout=900)
    assert first == second
    kept = {text: cell for text, cell in first.items() if cell in (SAME, "not compared")}
    told = line("one rank of two alone", first, first | kept)
    assert told in PAGE.read_text(encoding="utf-8").split("\n")
