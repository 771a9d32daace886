"""kill -9 of a rank: the run that starts again has every loss and every bit of an unbroken one.

Two points here; support/fault_matrix.py has all of them, and slow, stopped and cut off ranks.
"""

import re

import pytest

from support.rank_runs import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of(tmp_path_factory.mktemp("killed"), "killed")


@pytest.mark.parametrize(
    ("point", "rank"), [pytest.param("in save", 0, marks=pytest.mark.long), ("in the sum", 1)]
)
def test_a_killed_rank_changes_nothing(results, point, rank):
    whole, killed = results["whole"], results[point]
    assert whole["exits"] == [[0, 0]]
    assert len(killed["exits"]) == 2
    assert killed["exits"][0][rank] == -9
    assert killed["exits"][0][1 - rank] == 1
    assert killed["exits"][1] == [0, 0]
    for name in ("trace", "adapter"):
        assert killed[name] == whole[name]
    assert killed["dealt"] == ""


def test_the_killed_rank_is_named_with_the_step(results):
    (saving, waiting), (first, last) = results["in save"]["errors"][0], results["in the sum"]["errors"][0]
    assert "rank 0 of 2 was lost in the save after step 4: last seen" in waiting
    # The sum may have ended for the other rank: it then waits in the comparison.
    assert re.search(
        r"rank 1 of 2 (was lost in the sum|did not reach the comparison after) .*step 4: last seen", first
    )
    assert "the sum of step 4" in first
    assert "rank" not in last
    assert "of 2 was lost" not in saving


def test_it_goes_on_by_itself_where_the_killed_start_was(results):
    for point, step in (("in save", 3), ("in the sum", 3)):
        assert f"checkpoint-{step}; 2 ranks" in results[point]["errors"][1][0]
