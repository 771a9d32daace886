"""docs/training.md, "What you may do between two steps": every cell is run, none is silent.

The table is written by `PYTHONPATH=python:tests/python python -m support.between_steps`.
"""

from __future__ import annotations

import pathlib

import pytest
import torch._dynamo

from support.between_steps import MODES, REFUSALS, SAME, of_mode, outcomes
from support.model_changes import ROWS

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "training.md"


def page() -> dict[str, dict[str, str]]:
    """The cells by mode and row."""
    text = PAGE.read_text(encoding="utf-8").partition("| between two steps | ")[2].partition("\n\n")[0]
    head, _, *lines = text.split("\n")
    modes = [mode.strip(" `") for mode in head.strip("| ").split("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return {mode: {row[0]: row[1 + place] for row in rows} for place, mode in enumerate(modes)}


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
