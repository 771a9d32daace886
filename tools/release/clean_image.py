"""From nothing to an answer without compilers: Debian in a folder, the wheel, the tutorial's commands.

    sudo python tools/release/clean_image.py WHEEL [--suite bookworm] [--wheels FOLDER] [--record FILE]

debootstrap makes the folder with Python and nothing to build with. Inside: `pip install WHEEL[train]`, then
`python -m monograph example tiny`, `train`, `generate`; the answer is compared. Seconds are printed for
each; downloads are timed apart (`pip download` comes first, the installation takes files). `--suite
bullseye` has Python 3.9, too old for torch: there the native tool runs and the operator library is loaded
beside torch's by a C program, which is what a glibc of 2.31 can show.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import shutil
import subprocess
import tempfile
import time
import zipfile
from typing import Any

TORCH = "2.13.0"
LOADER = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** paths) {
  for (int i = 1; i < count; ++i) {
    if (!dlopen(paths[i], RTLD_NOW | RTLD_GLOBAL)) return fprintf(stderr, "%s\n", dlerror()), 1;
  }
  return puts("loaded"), 0;
}
"""


class Image:
    def __init__(self, folder: pathlib.Path, suite: str, packages: str) -> None:
        self.folder = folder
        make = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(folder)]
        subprocess.run([*make, "http://deb.debian.org/debian"], check=True, stdout=subprocess.DEVNULL)

    def run(self, *command: str) -> tuple[str, float]:
        """What it printed and its seconds; an error carries the output."""
        began = time.monotonic()
        inside = [
            "chroot",
            str(self.folder),
            "/usr/bin/env",
            "-i",
            "PATH=/env/bin:/usr/bin:/bin",
            "HOME=/root",
            *command,
        ]
        done = subprocess.run(inside, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"{' '.join(command)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
            )
        return done.stdout, time.monotonic() - began


def tutorial(image: Image, wheel: pathlib.Path, wheels: pathlib.Path) -> dict[str, Any]:
    """Compilers are looked for first: none may be there."""
    found, _ = image.run("sh", "-c", "command -v g++ gcc cc c++ clang || echo none")
    if found.strip() != "none":
        raise SystemExit(f"the image has a compiler: {found}")
    into = image.folder / "wheels"
    shutil.copytree(wheels, into)
    shutil.copy(wheel, into)
    image.run("python3", "-m", "venv", "/env")
    name = f"/wheels/{wheel.name}[train]"
    rows = {
        "install": ["pip", "install", "-q", "--no-index", "--find-links", "/wheels", f"torch=={TORCH}", name],
        "example": ["python", "-m", "monograph", "example", "/tiny"],
        "train": ["python", "-m", "monograph", "train", "/tiny/recipe.yml"],
        "generate": [
            "python",
            "-m",
            "monograph",
            "generate",
            "/tiny/recipe.yml",
            "--prompt",
            "cod ape ram",
        ],
    }
    seconds = {}
    for row, command in rows.items():
        text, seconds[f"{row}_seconds"] = image.run(*command)
    if text.strip() != "ram ape cod":
        raise SystemExit(f"asked for cod ape ram backwards, it said {text!r}")
    seconds["all_seconds"] = sum(seconds.values())
    return {key: round(value, 1) for key, value in seconds.items()}


def old_libraries(image: Image, wheel: pathlib.Path, wheels: pathlib.Path) -> dict[str, Any]:
    """The tool and the operators of the wheel on a C library older than the one they were built on."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(image.folder / "wheel")
    for torch in wheels.glob(f"torch-{TORCH}*"):
        with zipfile.ZipFile(torch) as archive:
            parts = [name for name in archive.namelist() if name.startswith(("torch/lib/", "torch.libs/"))]
            archive.extractall(image.folder / "torch_wheel", parts)
    tool = next((image.folder / "wheel").glob("monograph-*.data/scripts/monograph"))
    tool.chmod(0o755)
    inside = f"/{tool.relative_to(image.folder)}"
    version, _ = image.run(inside, "--version")
    (image.folder / "load.c").write_text(LOADER)
    image.run("gcc", "-o", "/load", "/load.c", "-ldl")
    libraries = "LD_LIBRARY_PATH=/torch_wheel/torch/lib"
    loaded, _ = image.run("env", libraries, "/load", "libtorch_cpu.so", "/wheel/monograph/monograph_ops.so")
    return {"tool": version.strip(), "operators": loaded.strip()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--suite", default="bookworm", choices=("bookworm", "bullseye"))
    parser.add_argument(
        "--wheels", type=pathlib.Path, help="a folder for the downloads, kept; default: a new one"
    )
    parser.add_argument("--record", type=pathlib.Path, help="a file of JSON lines to add to")
    arguments = parser.parse_args()
    old = arguments.suite == "bullseye"
    with tempfile.TemporaryDirectory() as name:
        wheels = arguments.wheels or pathlib.Path(name) / "wheels"
        download = ["python", "-m", "pip", "download", "-q", "-d", str(wheels), f"torch=={TORCH}"]
        subprocess.run([*download, f"{arguments.wheel.resolve()}[train]"], check=True)
        packages = "gcc,libc6-dev" if old else "python3,python3-venv,ca-certificates"
        image = Image(pathlib.Path(name) / "image", arguments.suite, packages)
        found = (old_libraries if old else tutorial)(image, arguments.wheel, wheels)
        glibc, _ = image.run("sh", "-c", "ldd --version | head -1")
    record = {"image": arguments.suite, "glibc": glibc.split()[-1], "wheel": arguments.wheel.name, **found}
    print(json.dumps(record | {"processor": platform.processor() or platform.machine()}))
    if arguments.record:
        with arguments.record.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
