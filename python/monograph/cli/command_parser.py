"""What every command has: --quiet, --json, a hint for a mistyped option, and a last line "Next:"."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from typing import Any, NoReturn

# Options of every command; a launcher of several processes hands them on.
OUTPUT_OPTIONS = ("-q", "--quiet", "--json")
# As a help text has them.
_OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


class CommandParser(argparse.ArgumentParser):
    """argparse with --quiet and --json, which names the option that an unknown one is nearest to."""

    def __init__(self, command: str, description: str | None, **rest: Any) -> None:
        super().__init__(
            prog=f"python -m monograph {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **rest,
        )
        self.add_argument("-q", "--quiet", action="store_true", help="print results and errors only")
        self.add_argument("--json", action="store_true", help="print the result as JSON on stdout")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(self.unknown(rest[0]))
        return options

    def unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {word!r}"
        near = difflib.get_close_matches(name, _OPTION.findall(self.format_help()), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown option {name!r}{hint}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help tells more\n")


def say_next(options: argparse.Namespace, *words: str, note: str = "") -> None:
    """The last line: a command to run next, on stderr; not with --quiet or --json."""
    if not (options.quiet or options.json):
        sys.stdout.flush()
        print(f"Next: {shlex.join(words)}{note}", file=sys.stderr)
