"""Rows of the table of providers as a test wants them."""

from __future__ import annotations

import pytest

from monograph.ops import providers


def give_row(monkeypatch: pytest.MonkeyPatch, operator: str, device_type: str, *names: str) -> None:
    """Who may compute an operator of the table there, best first, until the test ends."""
    monkeypatch.setitem(providers.TABLE[operator], device_type, names)


def give_kernels(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """As if all operators had a kernel on every device, or none."""
    monkeypatch.setattr(providers, "has_kernel", lambda name, device: there)
