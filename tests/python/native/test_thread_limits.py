"""Few threads, no threads, no memory inside a parallel loop: never an abort."""

import os
import subprocess
import sys

import pytest
import torch

from support.failing_calls import digest, failing
from support.merge_reference import adapter_on, base_model
from support.native_tool import program, run


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    model = base_model(torch.bfloat16)
    model.save_pretrained(folder / "base")
    adapter_on(model, folder / "adapter", torch.float32)
    run("quantize", folder / "base", folder / "packed")
    return folder


def commands(folder, out):
    merge = ["merge", folder / "base", "--adapter", folder / "adapter", "--base", "original", "--out", out]
    return {
        "quantize": ["quantize", folder / "base", out, "--to", "nvfp4"],
        "dequantize": ["dequantize", folder / "packed", out],
        "merge": [*merge, "--warn-below", "0"],
        "verify": ["verify", folder / "base"],
        "diff": ["diff", folder / "base", folder / "packed", "--tolerance", "1"],
    }


@pytest.mark.parametrize("command", ["quantize", "dequantize", "merge", "verify", "diff"])
def test_jobs_have_a_range_that_the_error_names(folders, tmp_path, command):
    for jobs in ("200000", "1025", "-1"):
        message = run(*commands(folders, tmp_path / "out")[command], "--jobs", jobs, code=2).stderr
        assert "--jobs" in message
        assert "1024" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["quantize", "dequantize", "merge", "verify", "diff"])
def test_the_work_is_done_by_the_threads_that_the_system_gives(folders, tmp_path, command):
    wanted = run(*commands(folders, tmp_path / "wanted")[command], "--jobs", 1).stdout
    for granted in (0, 1, 5):
        environment = failing("pthread_create", at=granted, code=11) | {"FAIL_LAST": "1000000"}
        found = run(
            *commands(folders, tmp_path / str(granted))[command], "--jobs", 64, env=environment
        ).stdout
        if command in ("verify", "diff"):
            assert found == wanted
        else:
            kept = {name: sha for name, sha in digest(tmp_path / str(granted)).items() if name != "README.md"}
            assert kept.items() <= digest(tmp_path / "wanted").items()


def test_no_memory_inside_an_operator_is_an_exception():
    environment = os.environ | {
        "LD_PRELOAD": str(program("libfailing_calls.so")),
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-m", "support.operators_without_memory"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    for line in lines:
        name, count, raised = line.split(None, 2)
        assert int(count) >= 1, line
        assert "bad_alloc" in raised, (name, raised)
