"""`torchrun --max-restarts`: which start of which launch this is, and where its run goes on."""

from __future__ import annotations

import os
import socket

from monograph.recipe.run.checkpoint import checkpoints, load_state


def restarted() -> bool:
    """Whether torchrun has started these processes again, after one of them failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def launch_name() -> str:
    """The launch that this process belongs to, the same after a restart; empty without torchrun.

    Of one host it is torchrun's process; of several the name that all of them were given (--rdzv-id).
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    run = os.environ["TORCHELASTIC_RUN_ID"]
    if int(os.environ.get("GROUP_WORLD_SIZE") or 1) > 1:
        return run
    parent = os.getppid()
    with open(f"/proc/{parent}/stat", encoding="utf-8") as file:
        began = file.read().rpartition(")")[2].split()[19]  # field 22 of stat(5): process numbers come again
    return f"{run} {socket.gethostname()} {parent} {began}"


def own_checkpoint(output_dir: str, launch: str) -> str | None:
    """The newest checkpoint that this launch has written: others in the folder may be of another run."""
    for _, folder in sorted(checkpoints(output_dir).items(), reverse=True):
        if load_state(folder).get("launch") == launch:
            return folder
    return None
