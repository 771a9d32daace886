"""Monograph on the command line.

    python -m monograph example FOLDER
    python -m monograph preprocess CONFIG.yml [--debug] [--key value ...]
    python -m monograph train CONFIG.yml [--key value ...]
    python -m monograph generate CONFIG.yml [--prompt TEXT] [--key value ...]
    python -m monograph doctor CONFIG.yml [--json] [--key value ...]

Exit codes: 0 done, 1 failed, 2 wrong recipe or command line, 3 wrong data, 130 interrupted.
`python -m monograph COMMAND --help` says more.
"""

from __future__ import annotations

import importlib
import sys

# One command, one file: `run(arguments)` gives the exit code.
COMMANDS = ("example", "preprocess", "train", "generate", "doctor")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"monograph: {arguments[0]!r} is no command, wanted {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"monograph.commands.{arguments[0]}")
    try:
        return command.run(arguments[1:])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
