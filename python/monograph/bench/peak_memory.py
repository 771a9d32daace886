"""Peak memory of one piece of work, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_TEMPLATE = """
import torch
torch.set_num_threads({threads})
{setup}

def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":"))

before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # resets the high-water mark
{work}
print(status("VmHWM") - before)
"""


def peak_bytes(setup: str, work: str, threads: int = 1) -> int:
    """How far the resident memory rises above what `setup` left while `work` runs. Linux only."""
    program = _TEMPLATE.format(setup=setup, work=work, threads=threads)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])
