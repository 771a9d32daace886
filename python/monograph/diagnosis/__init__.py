"""doctor: runs a few training steps and says whether the promise holds: one graph, no copy of a weight.

    report = mg.doctor(model, [batch, other_batch])
    print(report)           # graphs, breaks, recompiles with cause and line; what is saved for backward
    report.holds            # False: print(report) says why

Under another trainer, transformers' or TRL's, with its own data and loss:

    print(mg.doctor(trainer))                   # traces only
    print(mg.doctor(trainer, inductor=True))    # also generates code, and times the steps
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monograph.diagnosis.model_doctor import doctor
    from monograph.diagnosis.report import Cause, Gathers, Report

__all__ = ["Cause", "Gathers", "Report", "doctor"]

# On first use: the self-test in this folder needs torch alone, a model's doctor needs transformers.
_ON_FIRST_USE = {
    "Cause": "monograph.diagnosis.report",
    "Gathers": "monograph.diagnosis.report",
    "Report": "monograph.diagnosis.report",
    "doctor": "monograph.diagnosis.model_doctor",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
