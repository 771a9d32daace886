"""A control group (cgroup v1) for a program that is measured: less memory, a slower disk."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

MOUNT = pathlib.Path("/sys/fs/cgroup")


def _own(controller: str) -> pathlib.Path:
    """The folder of the group that this process is in."""
    with open("/proc/self/cgroup") as file:
        for line in file.read().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return MOUNT / controller / path.lstrip("/")
    raise RuntimeError(f"/proc/self/cgroup has no controller {controller}, wanted cgroup v1 with it")


def device_of(path: str | os.PathLike[str]) -> str:
    """major:minor of the disk under a file; of a whole disk, as throttling wants it."""
    number = os.stat(path).st_dev
    major, minor = os.major(number), os.minor(number)
    block = pathlib.Path(f"/sys/dev/block/{major}:{minor}")
    if (block / "partition").exists():
        return (block.resolve().parent / "dev").read_text().strip()
    return f"{major}:{minor}"


class ControlGroup:
    """Children of this process's own groups, as long as the `with` lasts. Needs root.

    memory: bytes, page cache included. disk, rate: reads of that device, in bytes a second.
    """

    def __init__(self, memory: int | None = None, disk: str | None = None, rate: int | None = None) -> None:
        name = f"monograph-{os.getpid()}-{time.monotonic_ns()}"
        self._memory = None if memory is None else _own("memory") / name
        self._blkio = None if rate is None else _own("blkio") / name
        self._settings: list[tuple[pathlib.Path, str]] = []
        if self._memory is not None:
            self._settings.append((self._memory / "memory.limit_in_bytes", str(memory)))
        if self._blkio is not None:
            self._settings.append((self._blkio / "blkio.throttle.read_bps_device", f"{disk} {rate}"))

    @property
    def folders(self) -> list[str]:
        return [str(folder) for folder in (self._memory, self._blkio) if folder is not None]

    @property
    def most_memory(self) -> int:
        if self._memory is None:
            return 0
        return int((self._memory / "memory.max_usage_in_bytes").read_text())

    def join(self) -> None:
        """Moves the process that calls it; threads that come later go with it."""
        for folder in self.folders:
            (pathlib.Path(folder) / "cgroup.procs").write_text(str(os.getpid()))

    def __enter__(self) -> ControlGroup:
        for folder in self.folders:
            os.mkdir(folder)
        for path, value in self._settings:
            path.write_text(value)
        return self

    def __exit__(self, *_: Any) -> None:
        for folder in self.folders:
            for _attempt in range(50):  # a process that has ended leaves its group a little later
                try:
                    os.rmdir(folder)
                    break
                except OSError:
                    time.sleep(0.1)
