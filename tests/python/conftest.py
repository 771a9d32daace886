"""Marks the files whose tests generate code, train or run other programs: `-m "not slow"` leaves them out."""

from __future__ import annotations

import pytest

SLOW = """
bench_cases cli compiled_gradients crash default_step doctor doctor_trl elementwise_takeover experts_learn
fp16 generation loading_producers lora_plain lora_start merge nested_compile_region no_copy quant_linear
recipe_interrupted recipe_learns recipe_merge recipe_modes recipe_start recipe_train recurrent_road regions
regions_attacked regions_step router_loss safetensors_differential shard train_and_merge train_step
transformers_attention trl trl_resume fully_shard trainers_ranks
"""
_FILES = {f"test_{name}.py" for name in SLOW.split()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in _FILES:
            item.add_marker("slow")
