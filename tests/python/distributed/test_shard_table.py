"""What may wrap or save a model of `mg.shard`: each cell is run on ranks, and the page has what was found."""

from __future__ import annotations

import pytest

from support.shard_table import BEGIN, END, PAGE, REFUSED, all_rows, table
from support.wrapped_case import OTHER, SAME

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return all_rows(str(tmp_path_factory.mktemp("table")))


def test_no_cell_is_silent(rows):
    """On a sharded model everything has the bits of a whole one, or is refused with the name of a tensor."""
    allowed = {SAME, REFUSED, f"rank 0: {REFUSED}; rank 1: nothing to write"}
    assert [row for row in rows if row[2] not in allowed] == []
    assert [row for row in rows if OTHER in row[1]] == []


def test_the_page_has_the_table_that_the_ranks_give(rows):
    page = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert page == table(rows), "PYTHONPATH=tests/python python -m support.shard_table writes it"
