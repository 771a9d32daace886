"""What is looked at before each step costs at most 0.5 % of a step of `monograph.bench step`'s quick case.

On ranks, where their models are compared too, a step with all of it is within 2 % of one without.
"""

import statistics
import time

import pytest

from support.checked_steps import RATE, quick_step
from support.run_ranks import run_ranks

pytestmark = pytest.mark.slow
ROUNDS = 5  # of two ranks: ten ratios


def least(work, calls):
    """Seconds of processor time: other programs' are not counted."""
    found = []
    for _ in range(calls):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return min(found)


def test_the_checks_before_a_step_cost_half_a_percent_at_most(capsys):
    step, rows = quick_step()
    step(rows, RATE)
    whole = least(lambda: step(rows, RATE), 3)
    identity = least(step._check_identity, 100)
    ranks = least(lambda: step._same.numbers(step._identity.named_modules), 100)
    with capsys.disabled():
        print(f"\nstep {whole:.3f} s, identity {identity * 1e3:.2f} ms, ranks {ranks * 1e3:.2f} ms more")
    assert identity + ranks <= 0.005 * whole


def test_a_step_on_two_ranks_is_within_two_percent_of_one_without_checks(capsys):
    told = run_ranks(2, "support/checked_steps:paired", ROUNDS, timeout=900)
    ratios = told[0]["ratios"]
    low, middle, high = statistics.quantiles(ratios, n=4)
    share = max(rank["share"] for rank in told)
    with capsys.disabled():
        print(
            f"\nstep {told[0]['step']:.3f} s of processor time; with checks / without: median {middle:.4f}, "
            f"quartiles {low:.4f} to {high:.4f}, {len(ratios)} rounds, the best of {told[0]['sets']} sets; "
            f"the checks alone {100 * share:.2f} %"
        )
    assert middle <= 1.02
    assert share <= 0.01
