"""Import paths of earlier versions: each gives the module that took its place, the same object.

So old imports, pickles and `isinstance` hold. A module is imported when its old path is, not before.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "monograph.transformers_attention": "monograph.integrations.transformers.attention",
    "monograph.transformers_config": "monograph.integrations.transformers.config",
    "monograph.transformers_quantizer": "monograph.integrations.transformers.quantizer",
    "monograph.dense_weights": "monograph.integrations.transformers.dense_weights",
    "monograph.loading": "monograph.integrations.transformers.loading",
    "monograph.trl_head": "monograph.integrations.trl.head",
    "monograph.nn.lora_start": "monograph.integrations.peft.lora_start",
    "monograph.nn.lora_linear": "monograph.integrations.peft.lora_linear",
    "monograph.under_peft": "monograph.integrations.peft.optimize",
    "monograph.diagnosis.trainer": "monograph.integrations.transformers.trainer_doctor",
    "monograph.nn.packed_state": "monograph.spellings.packed_state",
}


class OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last, for names that no file has."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        # What stands in sys.modules afterwards is what the import gives.
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


def install() -> None:
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(OldPaths())
