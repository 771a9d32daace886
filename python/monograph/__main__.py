"""Monograph on the command line: `python -m monograph COMMAND`, which is `monograph COMMAND`."""

from __future__ import annotations

import importlib
import sys

from monograph.commands import native

# One command, one file: `run(arguments)` gives the exit code. As `monograph --help` lists them.
COMMANDS = {
    "example": "a small model, data and a recipe to try, offline",
    "preprocess": "tokenise and pack a dataset",
    "train": "fine-tune from a YAML file",
    "generate": "generate text with a checkpoint and an adapter",
    "doctor": "report graphs, breaks and recompiles of a training step",
    "estimate": "bytes that training takes: base, adapter, activations",
}

USAGE = """\
Monograph fine-tunes quantised language models as one graph.

    python -m monograph example FOLDER
    python -m monograph preprocess CONFIG.yml [--debug] [--key value ...]
    python -m monograph train CONFIG.yml [--nproc-per-node N] [--key value ...]
    python -m monograph generate OUT_DIR [--prompt TEXT] [--key value ...]
    python -m monograph doctor CONFIG.yml [--json] [--key value ...]
    python -m monograph doctor --device cuda [--json] [--out FILE]
    python -m monograph estimate MODEL [--format nf4] [--rank 16] [--tokens 4096]
    python -m monograph merge CONFIG.yml [--to TYPE] [--out DIR]
"""

EXIT_CODES = """\
Exit codes: 0 done, 1 failed, 2 wrong recipe or command line, 3 wrong data, 130 Ctrl-C, 143 SIGTERM.
`python -m monograph COMMAND --help` says more; `monograph COMMAND` is the same command.
"""


def usage() -> str:
    def rows(commands: dict[str, str]) -> str:
        return "".join(f"  {name:12}{summary}\n" for name, summary in commands.items())

    return (
        f"{USAGE}\nCommands:\n{rows(COMMANDS)}\n"
        f"Commands of the native program:\n{rows(native.COMMANDS)}\n{EXIT_CODES}"
    )


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        if arguments[0] in COMMANDS:
            return importlib.import_module(f"monograph.commands.{arguments[0]}").run(arguments[1:])
        if arguments[0] == "merge":
            from monograph.commands import merge

            if merge.names_a_recipe(arguments[1:]):
                return merge.run(arguments[1:])
            if missing := merge.what_is_missing(arguments[1:]):
                print(missing, file=sys.stderr)
                return 2
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "monograph":
            raise
        print(
            f"monograph: {arguments[0]} needs {error.name}, which is not installed: "
            "pip install 'monograph[train]'",
            file=sys.stderr,
        )
        return 1
    if arguments[0] in native.COMMANDS:
        return native.hand_over(arguments)
    wanted = ", ".join([*COMMANDS, *native.COMMANDS])
    print(f"monograph: {arguments[0]!r} is no command, wanted {wanted}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
