"""What tests of a recipe's keys start from."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest


@pytest.fixture
def good(tmp_path: pathlib.Path) -> dict[str, Any]:
    """The least recipe that is right."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = [{"path": str(tmp_path / "train.jsonl"), "type": "alpaca"}]
    return {
        "base_model": str(tmp_path / "model"),
        "adapter": "qlora",
        "datasets": data,
        "lora_target_linear": True,
    }
