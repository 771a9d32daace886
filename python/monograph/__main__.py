"""Monograph on the command line: `python -m monograph COMMAND`, which is `monograph COMMAND`."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback

from monograph.cli import native
from monograph.cli.exit_codes import ExitCode, table

# One command, one file: `run(arguments)` gives the exit code. As `monograph --help` lists them.
COMMANDS = {
    "example": "a small model, data and a recipe to try, offline",
    "preprocess": "tokenise and pack a dataset",
    "train": "fine-tune from a YAML file",
    "sweep-report": "a table of the adapters that one recipe has trained, the best first",
    "generate": "generate text with a checkpoint and an adapter; --native: tokens, without Python",
    "doctor": "report graphs, breaks and recompiles of a training step",
    "estimate": "bytes that training takes: base, adapter, activations",
}

# What axolotl, LLaMA-Factory and others call them.
ELSEWHERE = {
    "merge-lora": "merge",
    "inference": "generate",
    "chat": "generate",
    "fine-tune": "train",
    "sft": "train",
    "tokenize": "preprocess",
    "compare": "diff",
    "check": "verify",
}

USAGE = """\
Monograph fine-tunes quantised language models as one graph.

    python -m monograph example FOLDER
    python -m monograph preprocess CONFIG.yml [--debug] [--key value ...]
    python -m monograph train CONFIG.yml [--nproc-per-node N] [--key value ...]
    python -m monograph sweep-report OUT_DIR [--json]
    python -m monograph generate OUT_DIR [--prompt TEXT] [--key value ...]
    python -m monograph doctor CONFIG.yml [--json] [--key value ...]
    python -m monograph doctor --device cuda [--json] [--out FILE]
    python -m monograph estimate MODEL [--format nf4] [--rank 16] [--tokens 4096]
    python -m monograph merge CONFIG.yml [--to TYPE] [--out DIR]
"""

MORE = (
    "`python -m monograph COMMAND --help` says more; `monograph COMMAND` is the same command.\n"
    "Every command takes --quiet and --json."
)


def usage() -> str:
    def rows(commands: dict[str, str]) -> str:
        return "".join(f"  {name:13}{summary}\n" for name, summary in commands.items())

    return (
        f"{USAGE}\nCommands:\n{rows(COMMANDS)}\n"
        f"Commands of the native program:\n{rows(native.COMMANDS)}\n{MORE}\n\n{table()}"
    )


def main(arguments: list[str]) -> int:
    if not arguments:
        print(
            f"{usage()}\nmonograph: no command was given; begin with `python -m monograph example FOLDER`",
            file=sys.stderr,
        )
        return 2
    if arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"monograph {version('monograph')}")
        except PackageNotFoundError:
            print("monograph, from its source tree")
        return 0
    try:
        if arguments[0] in COMMANDS:
            return importlib.import_module(f"monograph.cli.{arguments[0].replace('-', '_')}").run(
                arguments[1:]
            )
        if arguments[0] == "merge":
            from monograph.cli import merge

            if merge.names_a_recipe(arguments[1:]):
                return merge.run(arguments[1:])
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "monograph":
            raise
        print(
            f"monograph: {arguments[0]} needs {error.name}, which is not installed: pip install "
            "--no-build-isolation '.[train]' in the source tree, or pip install 'WHEEL[train]' (README.md, "
            "section Install)",
            file=sys.stderr,
        )
        return ExitCode.IO
    if arguments[0] in native.COMMANDS:
        return native.exec_native(arguments)
    wanted = [*COMMANDS, *native.COMMANDS]
    hint = f"did you mean {near!r}? " if (near := _nearest(arguments[0], wanted)) else ""
    said = f"unknown command {arguments[0]!r}; {hint}expected one of {', '.join(wanted)}"
    print(f"monograph: {said}", file=sys.stderr)
    return ExitCode.USAGE


def run(arguments: list[str]) -> int:
    """What `main` gives; a mistake that nobody expected has its traceback and an exit code of its own."""
    try:
        return main(arguments)
    except Exception as error:
        if _lacks_memory(error):
            why = str(error).strip().partition("\n")[0]
            print(f"monograph: out of memory{': ' if why else ''}{why}", file=sys.stderr)
            return ExitCode.MEMORY
        traceback.print_exc()
        return ExitCode.INTERNAL


def _lacks_memory(error: Exception) -> bool:
    """Python's error, torch's, and that of an operator of ours, which arrives as text."""
    words = ("std::bad_alloc", "DefaultCPUAllocator: can't allocate", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _nearest(written: str, commands: list[str]) -> str:
    """The command that a word is nearest to, by its letters or by what other programs call it; else empty."""
    word = written.lower().replace("_", "-").lstrip("-")
    near = difflib.get_close_matches(word, [*commands, *ELSEWHERE], n=1, cutoff=0.6)
    return ELSEWHERE.get(near[0], near[0]) if near else ""


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
