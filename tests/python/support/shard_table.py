"""What may wrap or save a model of `mg.shard`: each row is run on two ranks, on a whole and a sharded model.

    PYTHONPATH=tests/python python -m support.shard_table  # writes the table of docs/explain/distributed.md

A cell is "same bits" (those of the same work on a whole model), "refused by name" (the error has the name of
a tensor and says that it is sharded), or how else it ended, spelt out.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.state_dict_loader import load

from monograph.distributed import World
from support import wrapped_and_saved, wrapped_by_trainers
from support.run_ranks import run_ranks
from support.wrapped_case import Case

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "explain" / "distributed.md"
BEGIN, END = "<!-- wraps -->\n", "<!-- end -->"
REFUSED = "refused by name"
ROWS = wrapped_by_trainers.ROWS | wrapped_and_saved.ROWS


def cell(work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as error:
        text = str(error)
        named = re.search(r"[\w.]+\.(\w+) is sharded over 2 ranks", text) or "made by fully_shard" in text
        return REFUSED if named else f"{type(error).__name__}: {text}"


def all_cells(world: World, folder: str, only: str = "") -> dict[str, dict[str, str]]:
    """Every row in both columns, as this rank found it."""
    found: dict[str, dict[str, str]] = {}
    for name, row in ROWS.items():
        if only in name:
            found[name] = {}
            for column, cut in (("whole", False), ("cut", True)):
                found[name][column] = cell(lambda: row(Case(world, cut, folder)))  # noqa: B023
                world.barrier()
    return found


def other_number(world: World, folder: str) -> list[str]:
    """Both columns on this number of ranks, of checkpoints that `dcp_state` has written on two."""

    def loaded(case: Case) -> str:
        model = case.model(other=True)
        load(model.state_dict(), checkpoint_id=case.path("dcp", of_rank=False))
        return case.as_whole(model)

    return [cell(lambda: loaded(Case(world, cut, folder))) for cut in (False, True)]  # noqa: B023


def all_rows(folder: str) -> list[list[str]]:
    """[row, on a whole model, on a sharded one]."""
    ranks = run_ranks(2, "support/shard_table:all_cells", folder, timeout=1800)
    rows = []
    for name in ROWS:
        rows.append([name, *(said([rank[name][column] for rank in ranks]) for column in ("whole", "cut"))])
    loaded = run_ranks(3, "support/shard_table:other_number", folder)
    place = 1 + list(ROWS).index("`dcp.save`, `dcp.load` of `state_dict()`")
    rows.insert(place, ["`dcp.load` of that on three ranks", *map(said, zip(*loaded, strict=True))])
    return rows


def said(cells: Sequence[str]) -> str:
    """What all ranks found, or what each did."""
    if len(set(cells)) == 1:
        return cells[0]
    return "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(cells))


def table(rows: list[list[str]]) -> str:
    head = [["what wraps or saves the model", "whole on each rank", "sharded by `mg.shard`"], ["---"] * 3]
    return "".join(f"| {' | '.join(row)} |\n" for row in head + rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = table(all_rows(folder))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
