"""The commands of the native program: `python -m monograph inspect ...` is `monograph inspect ...`."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

PROGRAM = "monograph"
# As `monograph --help` lists them.
COMMANDS = {
    "inspect": "what is inside a checkpoint: formats, shapes, sizes, totals",
    "quantize": "a model folder to NF4, FP4, MXFP4, MXFP8, NVFP4, FP8, INT4 or INT8",
    "dequantize": "a packed model folder back to bf16, fp16 or fp32",
    "convert": "a GPTQ, AWQ or AutoRound folder in the layout of compressed-tensors",
    "merge": "merge PEFT adapters into a base model",
    "export": "a model folder as one GGUF file for llama.cpp and Ollama",
    "finetune": "fine-tune a packed base with LoRA, without Python",
    "adapter": "check an adapter for a server, or write the form that the server applies",
    "verify": "check structure, index, numbers and checksums of a checkpoint",
    "diff": "how two checkpoints differ, weight by weight, across formats",
    "completion": "print a completion script for bash, zsh or fish",
    "man": "print the man page",
}


def find_program() -> str | None:
    """$MONOGRAPH_TOOL; else the one that was installed with this Python; else the first on the PATH."""
    if chosen := os.environ.get("MONOGRAPH_TOOL"):
        return chosen
    schemes = ("scripts", sysconfig.get_default_scheme()), ("scripts", sysconfig.get_preferred_scheme("user"))
    folders = [pathlib.Path(sys.executable).parent, *(sysconfig.get_path(*scheme) for scheme in schemes)]
    installed = (shutil.which(PROGRAM, path=str(folder)) for folder in folders)
    return next((path for path in installed if path), None) or shutil.which(PROGRAM)


def run_beside(arguments: list[str]) -> int:
    """Runs `monograph ARGUMENTS` as a child and returns its exit code; 5 if there is no such program."""
    sys.stdout.flush()
    sys.stderr.flush()
    program = find_program()
    try:
        if program is not None:
            return subprocess.run([program, *arguments], check=False).returncode
        problem = "there is none beside this Python or on the PATH"
    except OSError as error:
        problem = f"{program} cannot be run: {error.strerror}"
    print(f"monograph: {arguments[0]!r} is done by the native program, and {problem}.", file=sys.stderr)
    return 5


def exec_native(arguments: list[str]) -> int:
    """Replaces this process by `monograph ARGUMENTS`; returns an exit code only if that is impossible.

    `arguments` begin with the name of the command. Signals, exit codes and the terminal are then the
    program's own.
    """
    program = find_program()
    problem = "there is none beside this Python or on the PATH"
    sys.stdout.flush()
    sys.stderr.flush()
    if program is not None:
        try:
            os.execv(program, [program, *arguments])
        except OSError as error:
            problem = f"{program} cannot be run: {error.strerror}"
    print(
        f"monograph: {arguments[0]!r} is done by the native program, and {problem}. Install the wheel of "
        "monograph, or set MONOGRAPH_TOOL.",
        file=sys.stderr,
    )
    return 5
