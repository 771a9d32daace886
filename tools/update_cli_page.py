"""Fills the help texts of docs/reference/cli.md with what the program prints.

    python tools/update_cli_page.py [--check] [build/release/cli/monograph]

A block that begins with a line `$ monograph COMMAND --help` gets the real output below it. With --check
nothing is written, and the exit code is 1 if a block is not what the program prints.
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "cli.md"
BLOCK = re.compile(r"```\n(\$ monograph(?P<arguments>[- a-z]*) --help)\n.*?```", re.DOTALL)


def filled(text: str, program: pathlib.Path) -> str:
    def block(match: re.Match[str]) -> str:
        command = [str(program), *match["arguments"].split(), "--help"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return f"```\n{match[1]}\n{shown.rstrip()}\n```"

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("program", nargs="?", type=pathlib.Path, default=ROOT / "build/release/cli/monograph")
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()
    text = PAGE.read_text()
    new = filled(text, arguments.program)
    if not arguments.check:
        PAGE.write_text(new)
    elif new != text:
        print("docs/reference/cli.md: a help text is not what the program prints; tools/update_cli_page.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
