"""output_dir of a run: one run at a time, and what an earlier run has left there stays its own."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from monograph.recipe.run.checkpoint import checkpoints

_LOCK = ".monograph.lock"
_EARLIER = "earlier-"
# What a finished run has written, and its name in the folder.
_FINISHED = {"adapter_config.json": "adapter", "config.json": "model"}


@contextmanager
def held(output_dir: str) -> Iterator[None]:
    """Makes the folder and holds it until the run ends, or its process: a second run into it is refused.

    A file system without locks (ENOLCK, ENOTSUP) is used without one, and that is said.
    """
    if os.path.exists(output_dir) and not os.path.isdir(output_dir):
        raise ValueError(f"output_dir: {output_dir} is a file, wanted a folder")
    with no_empty_folder(output_dir):
        os.makedirs(output_dir, exist_ok=True)
        path = os.path.join(output_dir, _LOCK)
        descriptor = _lock(path, output_dir)
        try:
            yield
        finally:
            if descriptor is not None:
                os.unlink(path)  # while it is locked: who opened it meanwhile looks whether it is still there
                os.close(descriptor)


@contextmanager
def no_empty_folder(output_dir: str) -> Iterator[None]:
    """Folders that are made inside for output_dir and stay empty are gone at the end."""
    made, path = [], os.path.abspath(output_dir)
    while not os.path.exists(path):
        made.append(path)
        path = os.path.dirname(path)
    try:
        yield
    finally:
        with suppress(OSError):  # one that holds something stays
            for path in made:
                os.rmdir(path)


def _lock(path: str, output_dir: str) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 256).decode(errors="replace").strip()
            os.close(descriptor)
            raise ValueError(
                f"output_dir: another run writes into {output_dir} ({holder or 'not known which'}); wait for "
                "it, or write another output_dir"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            print(
                f"note: output_dir: {output_dir} cannot be locked ({error.strerror}); start no second run "
                "there",
                file=sys.stderr,
            )
            return None
        if _is_at(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # of a run that has just ended and taken its name away


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def finished_run(output_dir: str) -> str:
    """What a run has written here as its end, adapter or model; else empty."""
    found = (what for name, what in _FINISHED.items() if os.path.isfile(os.path.join(output_dir, name)))
    return next(found, "")


def set_aside(output_dir: str, resumed: str | None, step: int) -> list[str]:
    """Before the first step: moves checkpoints that this run does not come from into a folder `earlier-N`.

    Rotation goes by the number of the step, so that those of another run would be kept in the place of this
    one's, and `auto` would go on from them. resumed: the checkpoint that the run goes on from, at `step`.
    Gives the lines to say, also on what the end of the run replaces.
    """
    told = []
    parent = os.path.dirname(os.path.abspath(resumed)) if resumed else None
    own = parent is not None and os.path.samefile(parent, output_dir)
    foreign = [path for number, path in checkpoints(output_dir).items() if not own or number > step]
    if resumed is None and (what := finished_run(output_dir)):
        told.append(
            f"output_dir: {output_dir} holds the {what} of an earlier run; the end of this one replaces it, "
            "its recipe.yml and its tokenizer; metrics.jsonl begins anew now"
        )
    if foreign:
        target = _next_free(output_dir)
        os.mkdir(target)
        for path in foreign:
            shutil.move(path, target)
        names = ", ".join(os.path.basename(path) for path in foreign)
        told.append(f"output_dir: {names} of an earlier run: moved into {target}")
    return told


def _next_free(output_dir: str) -> str:
    number = 1
    while os.path.exists(path := os.path.join(output_dir, f"{_EARLIER}{number}")):
        number += 1
    return path
