"""What a person sees of a run, on terminals of several widths and without one."""

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from monograph.recipe.run import progress
from monograph.recipe.run.progress import Reporter


@pytest.fixture
def clock(monkeypatch):
    """A first step of 100 seconds, which traces; one second for each of the others."""
    times = iter([0.0, 100.0, *(101.0 + n for n in range(1000))])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(times))


def shown(width, steps, total=10_000, terminal=True):
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="truecolor", legacy_windows=False
    )
    with Reporter(total, 0, console) as reporter:
        for _ in range(steps):
            reporter.step(1.2345, 12_345, 0.98, 12.3)
        if not terminal:
            return file.getvalue()
        file.truncate(0)
        reporter._bar.refresh()
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    return next(line for line in text.replace("\r", "\n").splitlines() if "/" in line).strip("\0")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_bar_loss_speed_and_time_left_fit(clock, width):
    line = shown(width, steps=5)
    assert len(line.rstrip()) <= width
    assert line.count("━") + line.count("╸") + line.count("╺") >= 10
    for wanted in ("5/10000", "loss 1.2345", "12,345 tokens/s", "2:46:35 left"):
        assert wanted in line
    assert ("98% filled" in line) == (width > 90)


def test_a_narrow_terminal_keeps_bar_and_loss(clock):
    line = shown(44, steps=5)
    assert "loss 1.2345" in line
    assert "━" in line or "╺" in line
    assert len(line.rstrip()) <= 44


def test_the_first_step_says_nothing_of_the_time_left(clock):
    line = shown(120, steps=1)
    assert "first step 0:01:40" in line
    assert "left" not in line
    assert "tokens/s" not in line


def test_without_a_terminal_all_figures_are_in_a_line(clock):
    text = shown(80, steps=3, total=3, terminal=False)
    assert "step 3/3 loss 1.2345 · 12,345 tokens/s · 12.3 GiB · 98% filled · 0:00:00 left" in text


def test_memory_is_that_of_the_process_and_not_of_its_parent():
    parent = bytearray(3 << 30)
    parent[:: 1 << 12] = b"1" * len(parent[:: 1 << 12])
    code = "from monograph.recipe.run.progress import peak_memory_gib; print(peak_memory_gib())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.05 < float(done.stdout) < 2
