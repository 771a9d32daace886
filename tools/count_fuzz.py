"""Runs fuzz targets and counts what they executed, a JSON line a target; minimises and keeps their inputs.

    cmake --preset fuzz-fast && cmake --build --preset fuzz-fast
    python tools/count_fuzz.py build/fuzz-fast --seconds 600 --record bench/results/fuzz.jsonl
    python tools/count_fuzz.py build/fuzz-fast --keep 60

With --keep nothing is fuzzed: what runs found is minimised, and copied into tests/files/fuzz. Until then it
stays below the build folder, where the next run goes on. Two targets run at a time. Exit code 1 if a target
ended with a finding: findings/TARGET/crash-*, oom-* or timeout-* in the build folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEEDS = ROOT / "tests" / "files" / "fuzz"
FINDINGS = ("crash-", "oom-", "timeout-", "leak-")


def targets(build: pathlib.Path) -> dict[str, pathlib.Path]:
    found = {
        path.name.removeprefix("fuzz_"): path
        for path in sorted(build.rglob("fuzz_*"))
        if path.is_file() and os.access(path, os.X_OK) and not path.suffix
    }
    if not found:
        raise SystemExit(f"{build}: holds no fuzz_* program; cmake --build --preset fuzz-fast")
    return found


def statistics(text: str) -> dict[str, int]:
    """What libFuzzer prints with -print_final_stats=1, and the features of its last line."""
    found = {name: int(value) for name, value in re.findall(r"^stat::(\w+):\s+(\d+)", text, re.MULTILINE)}
    features = re.findall(r"\bft: (\d+)", text)
    return found | {"features": int(features[-1]) if features else 0}


def run(name: str, target: pathlib.Path, build: pathlib.Path, seconds: int, longest: int) -> dict[str, Any]:
    inputs, findings = build / "inputs" / name, build / "findings" / name
    for folder in (inputs, findings, SEEDS / name):
        folder.mkdir(parents=True, exist_ok=True)
    command: list[Any] = [target, inputs, SEEDS / name, f"-dict={SEEDS / 'json.dict'}", f"-max_len={longest}"]
    command += [f"-max_total_time={seconds}", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
    # A regular file: a pipe that nobody empties would stop the target.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        code = subprocess.run(command, stdout=said, stderr=said, cwd=build).returncode
        said.seek(max(said.seek(0, os.SEEK_END) - 100_000, 0))
        figures = statistics(said.read())
    return {
        "target": name,
        "build": build.name,
        "date": datetime.date.today().isoformat(),
        "seconds": seconds,
        "executions": figures.get("number_of_executed_units", 0),
        "features": figures["features"],
        "inputs": sum(1 for _ in inputs.iterdir()),
        "findings": sum(path.name.startswith(FINDINGS) for path in findings.iterdir()),
        "exit": code,
    }


def keep(name: str, target: pathlib.Path, build: pathlib.Path, most: int) -> str:
    """Merges what was found into the smallest set with the same features, of which the smallest are kept."""
    seeds = SEEDS / name
    seeds.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command: list[Any] = [target, "-merge=1", folder, seeds, build / "inputs" / name]
        subprocess.run(command, check=True, capture_output=True)
        merged = sorted(pathlib.Path(folder).iterdir(), key=lambda path: (path.stat().st_size, path.name))
        known = {path.read_bytes() for path in seeds.iterdir()}
        new = [path for path in merged if path.read_bytes() not in known][: max(most - len(known), 0)]
        for path in new:
            shutil.copyfile(path, seeds / path.name)
    return f"{name}: {len(merged)} inputs have the features of all, {len(new)} are new in {seeds}"


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("build", type=pathlib.Path, help="the build folder of a preset for fuzzing")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument(
        "--max-len", type=int, default=512, help="longest input in bytes: small ones are fast"
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of targets")
    parser.add_argument("--record", type=pathlib.Path, help="a file that the lines are added to")
    parser.add_argument("--keep", type=int, metavar="N", help="keep up to N minimised inputs of each target")
    chosen = parser.parse_args()
    build = chosen.build.resolve()
    found = targets(build)
    if unknown := set(chosen.only) - set(found):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    found = {name: path for name, path in found.items() if not chosen.only or name in chosen.only}
    if chosen.keep is not None:
        for name, path in found.items():
            print(keep(name, path, build, chosen.keep), flush=True)
        return 0
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run, name, path, build, chosen.seconds, chosen.max_len)
            for name, path in found.items()
        ]
        for done in concurrent.futures.as_completed(runs):
            row = done.result()
            failed += row["exit"] != 0 or row["findings"] > 0
            print(json.dumps(row), flush=True)
            if chosen.record:
                with chosen.record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
