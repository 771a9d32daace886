"""examples/first_run.ipynb from examples/first_run.py: a cell for each "# %%" line, with its text above.

python tools/release/notebook.py [--check]
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "first_run.py", EXAMPLES / "first_run.ipynb"


def cell(kind: str, name: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def notebook(script: str) -> dict[str, Any]:
    """The docstring is the first cell; a comment behind "# %%" stands above its code."""
    parts = re.split(r"^# %% (.*)\n", script, flags=re.MULTILINE)
    about = parts[0].strip().strip('"').strip()
    cells = [cell("markdown", "about", about)]
    for index, (title, code) in enumerate(zip(parts[1::2], parts[2::2], strict=True)):
        cells += [cell("markdown", f"title-{index}", title), cell("code", f"code-{index}", code.strip())]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about_all = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about_all, "nbformat": 4, "nbformat_minor": 5}


def main() -> int:
    wanted = json.dumps(notebook(SCRIPT.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--check"]:
        same = NOTEBOOK.exists() and NOTEBOOK.read_text(encoding="utf-8") == wanted
        print(
            "the notebook is the script's"
            if same
            else f"{NOTEBOOK.name} is not made from {SCRIPT.name}: run this without --check"
        )
        return 0 if same else 1
    NOTEBOOK.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
