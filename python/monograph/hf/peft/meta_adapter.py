"""An adapter without memory, on a model without memory (hf/transformers/meta_model.py)."""

from __future__ import annotations

import warnings
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model

from monograph.hf.peft.lora_experts import all_linear_without_router


def with_meta_adapter(model: Any, rank: int, targets: str | list[str]) -> PeftModel:
    """The model with PEFT's LoRA as a recipe makes it; "all-linear" has the experts, not the router."""
    config = LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PEFT's patterns for experts that were linear once
        return get_peft_model(model, all_linear_without_router(model, config), low_cpu_mem_usage=True)
