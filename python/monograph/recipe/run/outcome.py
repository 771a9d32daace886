"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """signal: the one that ended it early, None if none did."""

    step: int
    total: int
    signal: int | None
    best_step: int | None
    output_dir: str
    writes: bool = True  # false on ranks that leave it to rank 0

    @property
    def interrupted(self) -> bool:
        return self.signal is not None
