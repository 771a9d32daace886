"""What the CUDA library must be, seen without a GPU.

    python tools/check_cuda.py build/cuda/ops/cuda/monograph_cuda.so --architectures 80 86 89 90 100 120
    python tools/check_cuda.py LIBRARY --architectures ... --update      # into ops/cuda/registers.json

- code for each architecture, and PTX for all others;
- no kernel spills, or has a stack at all, and none uses more registers than ops/cuda/registers.json allows;
- dequantise fuses nothing: no fma in its PTX, every product and sum rounded by name, and no fused instruction
  in its machine code but inside a division (PTX: div.rn), which one format has;
- torch's stable ABI from 2.13 on, no Python, and no library of CUDA or of torch's CUDA part to load.
"""

import argparse
import collections
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import check_abi

CEILINGS = pathlib.Path(__file__).resolve().parent.parent / "ops/cuda/registers.json"
TORCH = "2.13.0"
NEEDED = {
    "libtorch_cpu.so",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
    "ld-linux-x86-64.so.2",
}
# Names of kernels by architecture, as numbers: registers and bytes of stack.
Usage = dict[str, dict[str, tuple[int, int]]]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def toolkit() -> pathlib.Path:
    spec = importlib.util.find_spec("nvidia.cu13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("nvidia.cu13 is not installed: .ci/install brings nvidia-cuda-cuobjdump")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def cuobjdump(library: pathlib.Path, option: str) -> str:
    return output(str(toolkit() / "bin" / "cuobjdump"), option, str(library))


def readable(text: str) -> str:
    """A kernel's name without its arguments: dequantize_kernel<Nf4, Bf16>."""
    names = subprocess.run(["c++filt"], input=text, check=True, capture_output=True, text=True).stdout
    names = re.sub(r"\bmonograph::(gpu::)?|\(anonymous namespace\)::|^void ", "", names, flags=re.MULTILINE)
    return re.sub(r"\(.*", "", names)


def resource_usage(library: pathlib.Path) -> Usage:
    found: list[tuple[str, str, int, int]] = []
    architecture = name = ""
    for line in cuobjdump(library, "--dump-resource-usage").splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            architecture = match[1]
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", line):
            found.append((architecture, name, int(match[1]), int(match[2]) + int(match[3])))
    names = readable("\n".join(name for _, name, _, _ in found)).splitlines()
    usage: Usage = collections.defaultdict(dict)
    for (architecture, _, registers, stack), name in zip(found, names, strict=True):
        usage[name][architecture] = (registers, stack)
    return usage


def check_architectures(library: pathlib.Path, wanted: list[str]) -> list[str]:
    found = {
        kind: set(re.findall(rf"\.sm_(\d+)\.{kind}", cuobjdump(library, option)))
        for kind, option in (("cubin", "-lelf"), ("ptx", "-lptx"))
    }
    findings = []
    if found["cubin"] != set(wanted):
        findings.append(f"code for {sorted(found['cubin'])}, wanted {sorted(wanted)}")
    if found["ptx"] != {"80"}:
        findings.append(f"PTX for {sorted(found['ptx'])}, wanted 80")
    return findings


def check_registers(usage: Usage, ceilings: dict[str, dict[str, int]], whole: bool) -> list[str]:
    findings = []
    for name, by_architecture in sorted(usage.items()):
        for architecture, (registers, stack) in by_architecture.items():
            most = ceilings.get(name, {}).get(architecture)
            if stack:
                findings.append(f"{name} on sm_{architecture}: {stack} bytes of stack, wanted 0")
            if most is None:
                findings.append(f"{name} on sm_{architecture}: not in {CEILINGS.name}; see --update")
            elif registers > most:
                findings.append(f"{name} on sm_{architecture}: {registers} registers, at most {most} wanted")
    if whole:
        findings += [f"{name}: in {CEILINGS.name}, not in the library" for name in set(ceilings) - set(usage)]
    return findings


def functions(text: str, start: str) -> dict[str, str]:
    """The text of each function that begins with `start`, by its name as the linker knows it."""
    parts = re.split(rf"{start}(\w+)", text)[1:]
    found: dict[str, str] = collections.defaultdict(str)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        found[name] += body
    return found


# A move of a constant is spelt as a product with the zero register.
SASS_FUSED = re.compile(r"\b(?:FFMA|DFMA|HFMA2(?!\.\S* \S+, -?RZ, RZ,)(?! \S+, -?RZ, RZ,))\S*")
PTX_FUSED = re.compile(r"\b(?:fma|mad)\.[a-z.]*f(?:16|32|64)\S*|\bb?f16x2\S*")
PTX_CONTRACTIBLE = re.compile(r"\b(?:mul|add|sub)\.(?!rn)[a-z.]*f(?:16|32|64)\S*")


def check_dequantize(ptx: str, sass: str) -> list[str]:
    findings, dividing = [], set()
    entries = {name: body for name, body in functions(ptx, r"\.entry ").items() if "dequantize" in name}
    code = {name: body for name, body in functions(sass, r"Function : ").items() if "dequantize" in name}
    if not entries or set(entries) != set(code):
        return [f"{len(entries)} kernels of dequantise in PTX, {len(code)} as code, wanted the same"]
    for name, body in entries.items():
        if "div.rn.f32" in body:
            dividing.add(name)
        for pattern, what in ((PTX_FUSED, "fused"), (PTX_CONTRACTIBLE, "without a rounding of its own")):
            findings += [f"{readable(name)}: {what} in PTX: {match[0]}" for match in pattern.finditer(body)]
    for name, body in code.items():
        fused = SASS_FUSED.findall(body)
        if fused and name not in dividing:
            findings.append(f"{readable(name)}: fused as code: {sorted(set(fused))}")
    return findings


def check_loading(library: pathlib.Path) -> list[str]:
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", str(library))))
    findings = [f"needs {name} to load" for name in sorted(needed - NEEDED)]
    return findings + check_abi.check_library(library) + check_abi.audit(library, TORCH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--architectures", nargs="+", required=True)
    parser.add_argument("--update", action="store_true", help="write the registers found as ceilings")
    arguments = parser.parse_args()
    usage = resource_usage(arguments.library)
    if arguments.update:
        known = json.loads(CEILINGS.read_text())
        rows = {
            name: {**known.get(name, {}), **{a: numbers[0] for a, numbers in row.items()}}
            for name, row in sorted(usage.items())
        }
        lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        CEILINGS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    whole = len(arguments.architectures) > 1
    findings = check_architectures(arguments.library, arguments.architectures)
    findings += check_registers(usage, json.loads(CEILINGS.read_text()), whole)
    findings += check_dequantize(cuobjdump(arguments.library, "-ptx"), cuobjdump(arguments.library, "-sass"))
    findings += check_loading(arguments.library)
    if findings:
        print("\n".join(f"{arguments.library.name}: {finding}" for finding in findings))
        return 1
    most = max(registers for row in usage.values() for registers, _ in row.values())
    print(
        f"{arguments.library.name}: {arguments.library.stat().st_size / 2**20:.1f} MiB, {len(usage)} kernels "
        f"for sm_{', sm_'.join(arguments.architectures)} and PTX, no spills, at most {most} registers, "
        f"nothing fused in dequantise, torch >= {TORCH}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
