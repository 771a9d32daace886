"""Seven adapters of a recipe: one hash each, by `--only` and in every cell of the product of circumstances.

The pairwise selection is slow, the product by instruction set and family long: both run in the rotating lane.
"""

from itertools import combinations, product

import pytest

from support.many_cells import ISAS, KINDS, MODES, PAIRWISE, PRODUCT, RANKS, SEVEN, here, results_of


def check(results, cells):
    assert len(results) == len(cells) > 0
    for cell in cells:
        found = results[str(cell)]
        assert len(set(found["alone"].values())) == len(SEVEN)
        different = [name for name, digest in found["alone"].items() if found["together"][name] != digest]
        assert different == [], str(cell)


@pytest.mark.slow
def test_every_pair_of_circumstances_leaves_one_hash(tmp_path):
    cells = here(PAIRWISE)
    check(results_of(tmp_path, cells), cells)


@pytest.mark.long
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_all_circumstances_leave_one_hash(isa, family, tmp_path):
    cells = here([cell for cell in PRODUCT if (cell.isa, cell.family) == (isa, family)])
    if not cells:
        pytest.skip(f"this machine has no {isa}")
    check(results_of(tmp_path, cells), cells)


def test_the_selection_has_every_pair():
    dimensions = {
        "isa": ISAS,
        "family": KINDS,
        "ranks": RANKS,
        "mode": MODES,
        "checkpointing": (False, True),
    }
    for one, other in combinations(dimensions, 2):
        found = {(getattr(cell, one), getattr(cell, other)) for cell in PAIRWISE}
        assert found == set(product(dimensions[one], dimensions[other])), (one, other)
    assert len(PRODUCT) == len(set(PRODUCT)) == 270
