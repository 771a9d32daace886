"""The beginner's notebook, cell by cell, and the script that it is made from."""

import json
import os
import re
import subprocess
import sys

import pytest

from support.native_tool import ROOT, program

pytestmark = pytest.mark.slow
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def test_the_notebook_is_the_scripts():
    subprocess.run([sys.executable, ROOT / "tools/release/notebook.py", "--check"], check=True)


def test_chats_preferences_merging_serving(tmp_path):
    """The cells in one process, as a kernel runs them."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    path = tmp_path / "cells.py"
    path.write_text("\n".join("".join(cell["source"]) for cell in cells))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{program().parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, env=environ, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    right = int(re.search(r"^(\d+) of 20 lists are right$", done.stdout, re.MULTILINE)[1])
    assert right >= 18, done.stdout
    assert (tmp_path / "first_run" / "merged" / "model.safetensors").exists()
