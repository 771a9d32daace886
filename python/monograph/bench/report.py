"""One JSON object a line, or a table for people."""

from __future__ import annotations

import json
from typing import Any

from monograph.bench.rounds import Paired


class Report:
    """Collects the lines of one benchmark and prints each as it comes."""

    def __init__(self, bench: str, as_json: bool) -> None:
        self.bench = bench
        self.as_json = as_json
        self.lines: list[dict[str, Any]] = []

    def case(self, case: dict[str, Any], result: Paired, ours: str, limit: str | None = None) -> None:
        peers = {name: ms for name, ms in result.best_ms.items() if name not in (ours, limit)}
        line = {
            "bench": self.bench,
            "case": case,
            "ours_ms": round(result.best_ms[ours], 4),
            "peers": {name: round(ms, 4) for name, ms in peers.items()},
            "ratio": {name: round(r, 3) for name, r in result.ratio.items()},
            "limit_ms": round(result.best_ms[limit], 4) if limit else None,
        }
        for name in ("tile_tflops", "vector_tflops"):
            if speed := getattr(result, name):
                line[name] = round(speed, 4)
                line["rounds_repeated"] = result.repeated
        self.lines.append(line)
        print(json.dumps(line) if self.as_json else _human(line), flush=True)

    def summary(self, numbers: dict[str, float]) -> None:
        line = {"bench": self.bench, "summary": {name: round(x, 3) for name, x in numbers.items()}}
        if self.as_json:
            print(json.dumps(line), flush=True)
        else:
            for name, number in line["summary"].items():  # type: ignore[attr-defined]
                print(f"  {name:48} {number:.3f}")


def _human(line: dict[str, Any]) -> str:
    case = " ".join(f"{key}={value}" for key, value in line["case"].items())
    ratios = " ".join(f"{name} {ratio:.2f}x" for name, ratio in line["ratio"].items())
    return f"{line['bench']:10} {case:58} ours {line['ours_ms']:9.3f} ms | {ratios}"
