"""Cases of a benchmark that takes long, written as they are measured: what is there is not measured again."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any


class RecordedRun:
    """A file of lines {case, settings, found}; None: nothing is written or known."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else pathlib.Path(path)

    def case(
        self, name: str, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """What was found last with these settings, or what `measure` finds now."""
        wanted = {key: str(value) for key, value in settings.items()}
        for line in reversed(self._lines()):
            if line["case"] == name and line["settings"] == wanted:
                known: dict[str, Any] = line["found"]
                return known
        found = measure()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a") as file:
                file.write(json.dumps({"case": name, "settings": wanted, "found": found}) + "\n")
        return found

    def _lines(self) -> list[dict[str, Any]]:
        if self._path is None or not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines() if line.endswith("}")]
