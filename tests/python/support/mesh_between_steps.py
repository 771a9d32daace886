"""The rows of support.model_changes on four ranks: two replicas of a base, each sharded over two ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

import monograph as mg
from monograph.distributed import World
from support.between_steps import SAME, Setting, Trained, cell_of, let_go, nothing, outcomes
from support.model_changes import ROWS, Row


def on_all(world: World, mode: str) -> dict[str, str]:
    """The same change on every rank of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with contextlib.redirect_stderr(io.StringIO()):
        return outcomes(
            Setting(mode, ours=lambda model: mg.shard(model, mesh), options={"world": world}, micro_batches=4)
        )


# On one rank alone: hooks, which may only log, and what is written in place to frozen tensors.
UNSEEN = "not compared"
_UNSEEN_ROWS = (
    "a forward hook in a layer",
    "a forward hook on a layer",
    "a forward hook outside the layers",
    "a forward pre-hook",
    "a backward hook",
    "a backward pre-hook",
    "a hook removed",
    "a hook of every module (`register_module_forward_hook`)",
    "a gradient hook of a parameter (`p.register_hook`)",
    "a buffer written in place (`rotary_emb.inv_freq`)",
)


def on_one(world: World, only: list[str] | None = None) -> dict[str, str]:
    """A change on the last rank alone, of a model that is whole on each. What that rank refuses by itself
    ends it, and the others with it; so it is asked first."""
    setting = Setting("eager", options={"world": world}, micro_batches=world.size)
    found = {}
    wanted = only or ROWS
    for text, (change, built) in ((text, ROWS[text]) for text in wanted):
        trained = Trained(setting, built)
        here = change if world.rank == world.size - 1 else nothing
        found[text] = _on_one(trained, here, world)
        assert found[text] != UNSEEN or text in _UNSEEN_ROWS, text
        let_go(trained.model)
    return found


def _on_one(trained: Trained, change: Row, world: World) -> str:
    try:
        losses = _steps(trained, change, world)
    except (RuntimeError, ValueError) as error:
        return cell_of(str(error))
    off = max(world.gathered(trained.off(nothing, losses)))
    return SAME if off == 0 else UNSEEN


def _steps(trained: Trained, change: Row, world: World) -> list[float]:
    losses = []
    for turn in (1, 2):
        told = ""
        try:
            change(trained.model, turn, _no_other)
            trained.ours.step._check_identity()
        except (RuntimeError, ValueError) as error:
            told = str(error)
        if refusal := next((one for one in world.gathered(told) if one), ""):
            raise RuntimeError(refusal)
        losses.append(trained.ours(trained.setting.rows(trained.number + turn, trained.model)))
    return losses


def _no_other() -> Callable[[Any], Any]:
    """A second step on one rank alone: without the others."""
    return lambda rows: None
