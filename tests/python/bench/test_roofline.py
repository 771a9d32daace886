"""The operators of benchmarks are a library that `import monograph` does not load."""

import os
import subprocess
import sys

import pytest
import torch

from monograph.bench import roofline

CODE = """
import monograph, torch
assert not hasattr(torch.ops.monograph, "limit_tiles")
from monograph.bench import roofline
assert torch.ops.monograph.limit_tiles(0) == 0
roofline.load()  # twice is once
"""


def test_only_benchmarks_load_the_library():
    subprocess.run([sys.executable, "-c", CODE], check=True, env=os.environ)


def test_the_traffic_writes_every_byte():
    values = (torch.arange(16384) % 255).to(torch.uint8)
    out = torch.full((2 * 16384,), 255, dtype=torch.uint8)
    roofline.limit_move(values, out)
    assert (out != 255).all()


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(roofline, "library_path", lambda name: tmp_path / name)
    monkeypatch.setattr(roofline.torch.ops, "monograph", object())
    with pytest.raises(ImportError, match=r"monograph_bench_ops\.so is missing"):
        roofline.load()
