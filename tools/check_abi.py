"""The operator library uses only stable symbols of torch and loads from torch 2.11 on.

    python tools/check_abi.py build/dist/monograph-0.1.0-py3-none-linux_x86_64.whl    # or the library itself

Two checks: the verdict of torch-abi-audit, and the undefined symbols of the library itself, which may
only be C shims of libtorch (aoti_torch_*, torch_*) or of the C and C++ run time, and must not include the
Python C API.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

MINIMUM = "2.11.0"
LIBRARIES = ["monograph/monograph_bench_ops.so", "monograph/monograph_ops.so"]
SHIMS = re.compile(r"^(aoti_torch_|torch_)")
TORCH_CPP = re.compile(r"^_Z.*(2at|3c10|5torch)")


def undefined_symbols(library: pathlib.Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1].split("@")[0] for line in listing.splitlines()]


def check_library(library: pathlib.Path) -> list[str]:
    findings = []
    symbols = undefined_symbols(library)
    for symbol in symbols:
        if symbol.startswith(("Py", "_Py")):
            findings.append(f"{library.name}: uses the Python C API: {symbol}")
        elif TORCH_CPP.match(symbol):
            findings.append(f"{library.name}: uses an unstable C++ symbol of torch: {symbol}")
    if not any(SHIMS.match(symbol) for symbol in symbols):
        findings.append(f"{library.name}: no shim of torch at all; is this the operator library?")
    return findings


def audit(library: pathlib.Path, minimum: str = MINIMUM) -> list[str]:
    done = subprocess.run(["torch-abi-audit", str(library), "--json"], capture_output=True, text=True)
    try:
        verdict = json.loads(done.stdout)["bundled_libs"][0]["torch"]
    except (json.JSONDecodeError, LookupError):
        return [f"torch-abi-audit gave no verdict: {done.stdout[-500:]}{done.stderr[-500:]}"]
    findings = []
    if not verdict["stable"] or verdict["unknown_shim_symbols"]:
        findings.append(f"torch-abi-audit: not stable: {verdict}")
    if verdict["min_torch_version"] != minimum:
        findings.append(f"torch-abi-audit: minimum torch is {verdict['min_torch_version']}, wanted {minimum}")
    return findings


def check_wheel(wheel: pathlib.Path) -> list[str]:
    findings = []
    if "-py3-none-" not in wheel.name:
        findings.append(f"{wheel.name}: wanted a py3-none wheel")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        if sorted(libraries) != LIBRARIES:
            findings.append(f"{wheel.name}: libraries are {libraries}, wanted {LIBRARIES}")
        for name in libraries:
            library = pathlib.Path(archive.extract(name, folder))
            findings += check_library(library) + audit(library)
    return findings


def main() -> int:
    given = pathlib.Path(sys.argv[1])
    findings = check_library(given) + audit(given) if given.suffix == ".so" else check_wheel(given)
    print("\n".join(findings) or f"{given.name}: stable ABI only, no Python C API, torch >= {MINIMUM}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
