"""Draws what a terminal of 80 columns shows of the first run of the README, as an SVG.

    python tools/site/draw_terminal.py docs/images/train.svg [--example FOLDER/tiny]

`python -m monograph example tiny` makes the model first, unless an example that is there is named. The
commands are run on a terminal of their own; of the bar the last moment is kept, and what other libraries say
while they load is left out. The picture loads no font from elsewhere.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pathlib
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 80, 40
EXAMPLE = "python -m monograph example tiny"
COMMANDS = [
    "python -m monograph train tiny/recipe.yml",
    'python -m monograph generate tiny/recipe.yml --prompt "cod ape ram"',
]
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
# Hidden and shown cursor, erased lines; colours stay.
CONTROL = re.compile(r"\x1b\[\??[0-9;]*[A-HJ-ln-zf]")


def shown_by(command: str, folder: pathlib.Path) -> str:
    """What a command writes to a terminal, with its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    words = [sys.executable, *command.split(maxsplit=1)[1:]]
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        f"exec {words[0]} {words[1]}",
        shell=True,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the last process has closed its side
                break
            written += piece
    os.close(ours)
    if process.returncode != 0:
        raise SystemExit(f"{command}: exit code {process.returncode}\n{written.decode()}")
    return last_moments(written.decode())


def last_moments(written: str) -> str:
    """The lines as they stand at the end: of a line that was drawn several times, the last drawing."""
    lines = written.replace("\r\n", "\n").rstrip("\n").split("\n")
    begins = 0  # before it other libraries say how they load
    for number, line in enumerate(lines):
        if "trainable parameters" in line:
            begins = number
        elif "Loading weights" in line:
            begins = number + 1
    lines = lines[begins:]
    return "\n".join(CONTROL.sub("", line.rsplit("\r", 1)[-1]) for line in lines)


def as_svg(screen: list[tuple[str, str]], title: str) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command, shown in screen:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")), soft_wrap=False)
        console.print(Text.from_ansi(shown))
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, monospace", f"font-family: {FONT}", svg)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path, help="the SVG to write")
    parser.add_argument("--example", type=pathlib.Path, help="a folder that `example` has made")
    parser.add_argument("--steps", type=int, help="train so many and ask nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if arguments.example:
            shutil.copytree(
                arguments.example, folder / "tiny", ignore=shutil.ignore_patterns("out", "prepared")
            )
        else:
            shown_by(EXAMPLE, folder)
        commands = [f"{COMMANDS[0]} --max-steps {arguments.steps}"] if arguments.steps else COMMANDS
        screen = [(command, shown_by(command, folder)) for command in commands]
    svg = as_svg(screen, "monograph")
    if "url(http" in svg or "href=" in svg:
        raise SystemExit("the picture would load something from elsewhere")
    arguments.out.write_text(svg + "\n", encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
