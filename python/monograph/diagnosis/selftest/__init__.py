"""The self-test of a device, `python -m monograph doctor --device cuda`: its owner runs it and sends it back.

    report = run(CudaDevice())      # a dictionary, see monograph.diagnosis.selftest.report
    wrong_with(report)              # [] if it is whole, unaltered and known here

docs/explain/gpu.md says what each test means. Nothing here needs a recipe or a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from monograph.diagnosis.selftest import (
    attention,
    digests,
    execution,
    probes,
    products,
    providers,
    timing,
    training,
)
from monograph.diagnosis.selftest.case import Case, Failed, Skipped
from monograph.diagnosis.selftest.device import Device
from monograph.diagnosis.selftest.report import finished, problems

CASES: tuple[Case, ...] = (
    *probes.CASES,
    *digests.CASES,
    *products.CASES,
    *execution.CASES,
    *attention.CASES,
    *providers.CASES,
    *training.CASES,
    *timing.CASES,
)
BUDGET_SECONDS = 300.0


def run(
    device: Device, say: Callable[[str], None] = lambda _: None, budget: float = BUDGET_SECONDS
) -> dict[str, Any]:
    """Runs every case; none can stop the others. What begins after `budget` seconds is skipped."""
    began = time.perf_counter()
    missing = device.missing()
    rows = []
    for case in CASES:
        late = time.perf_counter() - began > budget
        reason = missing or (f"{budget:.0f} s were over" if late else None)
        row = {"name": case.name, "result": "skipped", "reason": reason} if reason else outcome(case, device)
        say(f"{row['result']:8}{case.name}{': ' + row['reason'] if row['reason'] else ''}")
        rows.append(row)
    return finished(device, rows)


def outcome(case: Case, device: Device) -> dict[str, Any]:
    """One row of the report: pass, fail or skipped, with a reason for the latter two."""
    began = time.perf_counter()
    row: dict[str, Any] = {"name": case.name, "result": "pass", "reason": ""}
    try:
        figures = case.work(device)
        device.synchronize()
        row["figures"] = figures
    except Skipped as skipped:
        row |= {"result": "skipped", "reason": str(skipped)}
    except Failed as failed:
        row |= {"result": "fail", "reason": str(failed), "figures": failed.figures}
    except Exception as error:  # a fault of a device takes any form
        row |= {"result": "fail", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    row["seconds"] = round(time.perf_counter() - began, 3)
    return row


def wrong_with(report: Any) -> list[str]:
    """What is wrong with a report that was sent; empty if nothing is."""
    return problems(report, [case.name for case in CASES], digests.committed())
