"""Processor seconds of each compiled unit, measured around the compiler.

    python tools/compile_times.py build build/times [--wheel]     # from nothing; writes build/times/units.tsv
    python tools/compile_times.py report BEFORE.tsv [AFTER.tsv]   # totals and the ten slowest

`build` uses no cache. CMake's launcher is this file: it runs the compiler and appends the unit's user and
system seconds. Cores that share an execution unit slow each other down, so compare runs under like load.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

LOG = "MONOGRAPH_COMPILE_TIMES"
WHEEL = {
    "monograph_kernels",
    "monograph_checkpoint",
    "monograph_arguments",
    "monograph_ops",
    "monograph_bench_ops",
    "monograph",
}
PRECOMPILED = "precompiled_"  # headers; those of tests are no part of a wheel
SHOWN = 10


def launch(command: list[str]) -> int:
    """Run the compiler; append `seconds<TAB>object` to the file that $MONOGRAPH_COMPILE_TIMES names."""
    status = subprocess.call(command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = command[command.index("-o") + 1] if "-o" in command else "?"
    with open(os.environ[LOG], "a") as log:
        log.write(f"{used.ru_utime + used.ru_stime:.2f}\t{unit}\n")
    return status


def build(folder: Path, wheel: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder.resolve() / "units.tsv"
    environment = os.environ | {LOG: str(log), "CCACHE_DISABLE": "1"}
    # CMakeLists.txt takes its launcher from the variable CCACHE, a program: a script stands in for it.
    launcher = folder.resolve() / "launcher"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} launch "$@"\n')
    launcher.chmod(0o755)
    options = ["--preset", "release", "-B", str(folder / "tree"), f"-DCCACHE={launcher}"]
    subprocess.run(["cmake", *options], check=True, env=environment, stdout=subprocess.DEVNULL)
    targets = ["--target", "monograph_ops", "monograph_bench_ops", "monograph"] if wheel else []
    subprocess.run(["cmake", "--build", str(folder / "tree"), *targets], check=True, env=environment)


def read(path: Path) -> dict[str, float]:
    """Seconds by unit, "target: source"."""
    times: dict[str, float] = {}
    for line in path.read_text().splitlines():
        seconds, unit = line.split("\t")
        target, source = re.findall(r"CMakeFiles/([^/]*)\.dir/(.*?)(?:\.o)?$", unit)[0]
        name = f"{target}: {source.replace('__', '..')}"
        times[name] = float(seconds)  # compiled again: the last one counts
    return times


def in_wheel(unit: str) -> bool:
    target = unit.split(":")[0]
    return target in WHEEL or (target.startswith(PRECOMPILED) and not target.endswith("tests"))


def report(paths: list[Path]) -> None:
    runs = [read(path) for path in paths]
    groups = {"wheel": in_wheel, "tests": lambda unit: not in_wheel(unit), "all": lambda unit: True}
    print("| units | " + " | ".join(map(str, paths)) + " |")
    print("|---|" + "---|" * len(paths))
    for name, chosen in groups.items():
        sums = [[seconds for unit, seconds in run.items() if chosen(unit)] for run in runs]
        print(f"| {name} | " + " | ".join(f"{sum(one):.0f} s, {len(one)} units" for one in sums) + " |")
    targets = sorted({unit.split(":")[0] for run in runs for unit in run if in_wheel(unit)})
    for target in targets:
        sums = [[s for unit, s in run.items() if unit.split(":")[0] == target] for run in runs]
        print(f"| {target} | " + " | ".join(f"{sum(one):.0f} s, {len(one)} units" for one in sums) + " |")
    for path, run in zip(paths, runs, strict=True):
        print(f"\nslowest of {path}:")
        for unit, seconds in sorted(run.items(), key=lambda item: -item[1])[:SHOWN]:
            print(f"{seconds:6.1f} s  {unit}")


def main() -> None:
    if sys.argv[1:2] == ["launch"]:
        sys.exit(launch(sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("build", help="build from nothing and write units.tsv")
    one.add_argument("folder", type=Path)
    one.add_argument("--wheel", action="store_true", help="only what a wheel holds")
    two = commands.add_parser("report", help="print totals and the slowest units")
    two.add_argument("files", type=Path, nargs="+", metavar="UNITS.tsv")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.folder, arguments.wheel)
    else:
        report(arguments.files)


if __name__ == "__main__":
    main()
