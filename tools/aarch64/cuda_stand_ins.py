"""Stands in for libraries of CUDA, so that PyPI's torch for 64-bit Arm, built for CUDA, loads without them.

    python tools/aarch64/cuda_stand_ins.py TORCH ROOT OUT

TORCH is the unpacked wheel, with the real libcudart beside it; ROOT has the system's libraries. Every library
that torch names and nobody has becomes one in OUT that has no symbols of its own. Their symbols are in one
more that all of them name: the loader accepts a symbol without a version from any file but the one that the
version names. Each stops the process.
"""

import pathlib
import re
import subprocess
import sys

TOOLS = "aarch64-linux-gnu-"
SYMBOLS = "libcuda_stand_ins.so"
# Without it there is no card.
DRIVER = "libcuda.so.1"


def output(tool: str, *arguments: str | pathlib.Path) -> str:
    done = subprocess.run([TOOLS + tool, *map(str, arguments)], check=True, capture_output=True, text=True)
    return done.stdout


def symbols(library: pathlib.Path, kind: str) -> set[str]:
    lines = output("nm", "-D", "--without-symbol-versions", f"--{kind}-only", library).splitlines()
    return {line.split()[-1] for line in lines if line.split()[-2] not in ("w", "v")}


def needed(library: pathlib.Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-d", library)))


def link(name: str, out: pathlib.Path, *inputs: str | pathlib.Path) -> None:
    output(
        "gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-o", out / name, *inputs
    )


def main() -> None:
    torch, root, out = (pathlib.Path(argument) for argument in sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    ours = sorted((torch / "torch/lib").glob("*.so*"))
    real = [*ours, *torch.glob("nvidia/*/lib/libcudart.so*")]
    system = {path.name: path for path in root.glob("usr/lib/**/*.so*") if path.is_file()}
    wanted = {name for library in ours for name in needed(library)}
    missing = sorted(wanted - {path.name for path in real} - system.keys() - {DRIVER})
    there = real + [system[name] for name in wanted & system.keys()]
    defined = {name for library in there for name in symbols(library, "defined")}
    undefined = {name for library in ours for name in symbols(library, "undefined")}
    # What is in the program that loads them.
    names = sorted(name for name in undefined - defined if not name.startswith(("Py", "_Py")))
    source = out / "stand_ins.s"
    labels = "".join(f".globl {name}\n.type {name}, %function\n{name}:\n" for name in names)
    source.write_text(f".text\n{labels}brk #0\n")
    link(SYMBOLS, out, source)
    for name in missing:
        link(name, out, out / SYMBOLS)
    print(f"{len(missing)} libraries, {len(names)} symbols")


if __name__ == "__main__":
    main()
