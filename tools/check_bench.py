"""Fails if a figure in the summary of a benchmark is beyond its bound.

Bounds are written as comparisons:

    python tools/check_bench.py RESULT.jsonl 'cp_warm>=0.6' 'peak_anonymous_gib<=1.5'
"""

import json
import pathlib
import re
import sys


def main() -> int:
    lines = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines() if "{" in line]
    summary = next((line["summary"] for line in lines if "summary" in line), None)
    if summary is None:
        print(f"{sys.argv[1]}: no summary; the benchmark was skipped")
        return 0
    findings = 0
    for bound in sys.argv[2:]:
        match = re.fullmatch(r"(\w+)(>=|<=)([\d.]+)", bound)
        if match is None or match[1] not in summary:
            print(f"{bound}: no such figure in {sorted(summary)}")
            return 2
        found, wanted = summary[match[1]], float(match[3])
        if not (found >= wanted if match[2] == ">=" else found <= wanted):
            print(f"{match[1]} is {found}, wanted {match[2]} {wanted}")
            findings += 1
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
