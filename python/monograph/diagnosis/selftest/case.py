"""One test of the self-test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monograph.diagnosis.selftest.device import Device

Figures = dict[str, Any]


class Skipped(Exception):
    """The device or the machine lacks what the test needs; the text says what."""


class Failed(Exception):
    """The device gave something else than what was wanted."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


@dataclass(frozen=True)
class Case:
    """`work` gives figures for the report, or raises."""

    name: str
    work: Callable[[Device], Figures]


def require(condition: bool, reason: str, figures: Figures | None = None) -> None:
    if not condition:
        raise Failed(reason, figures)
