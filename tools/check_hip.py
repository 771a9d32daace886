"""The bodies of the GPU kernels as code for AMD, compiled without ROCm and without a card.

    python tools/check_hip.py [gfx90a gfx942 gfx1201]

clang compiles ops/hip/bodies.hip with the builtins of core/monograph/gpu/hip/. No kernel may spill or use
scratch memory, the waves must be as wide as the architecture's, and dequantise may fuse nothing: its
intermediate code has no fma, and no product or sum that may be contracted. What a link with ROCm's device
library adds, and what a card computes, is not seen here.
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLANG = "clang++-19"
# Lanes of a wave.
ARCHITECTURES = {"gfx90a": 64, "gfx942": 64, "gfx1201": 32}
FUSED = re.compile(r"@llvm\.(?:fma|fmuladd)\.\S+|\b(?:fmul|fadd|fsub) (?:\w+ )*(?:contract|fast)\b")


def compiled(architecture: str, *options: str) -> str:
    command = [CLANG, "-x", "hip", f"--offload-arch={architecture}", "--cuda-device-only", "-nogpuinc"]
    command += ["-nogpulib", "-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-S"]
    command += ["-Icore/monograph/gpu/hip", "-Icore", *options, "ops/hip/bodies.hip", "-o", "-"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def check_resources(architecture: str, assembly: str) -> tuple[list[str], int]:
    """The table of kernels at the end of the assembly; also how many there are."""
    findings, kernels = [], 0
    table = assembly[assembly.rindex("amdhsa.kernels:") :]
    for kernel in re.split(r"\n  - \.", table)[1:]:
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):\s+(\d+)$", kernel, re.MULTILINE)}
        name = re.search(r"\.name:\s+(\S+)", kernel)
        kernels += 1
        wanted = collections.Counter(wavefront_size=ARCHITECTURES[architecture])
        for key in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size", "wavefront_size"):
            if numbers.get(key, -1) != wanted[key]:
                findings.append(f"{name and name[1]}: {key} is {numbers.get(key)}, wanted {wanted[key]}")
    return findings, kernels


def check_dequantize(code: str) -> list[str]:
    findings, seen = [], 0
    for body in re.findall(r"^define .*?^}", code, flags=re.MULTILINE | re.DOTALL):
        name = re.search(r"@(\w+)", body)
        if name is None or "dequantize" not in name[1]:
            continue
        seen += 1
        findings += [f"{name[1]}: fused: {match[0]}" for match in FUSED.finditer(body)]
    return findings if seen else ["no kernel of dequantise in the code"]


def main() -> int:
    failed = False
    for architecture in sys.argv[1:] or ARCHITECTURES:
        if architecture not in ARCHITECTURES:
            print(f"{architecture}: wanted one of {', '.join(ARCHITECTURES)}")
            return 1
        findings, kernels = check_resources(architecture, compiled(architecture))
        findings += check_dequantize(compiled(architecture, "-emit-llvm"))
        lanes = ARCHITECTURES[architecture]
        summary = f"{kernels} kernels, waves of {lanes}, no spills, nothing fused in dequantise"
        print("\n".join(f"{architecture}: {finding}" for finding in findings or [summary]))
        failed |= bool(findings)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
