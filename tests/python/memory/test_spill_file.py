"""Spill files that are damaged, too large for their disk or left behind."""

import gc
import pathlib
import threading

import pytest
import torch

import monograph as mg

MIB = 1 << 20


def test_a_changed_or_cut_spill_file_is_an_error_that_names_it(tmp_path):
    for damage, said in (("flip", "checksum"), ("cut", "somebody cut it off")):
        x = torch.randn(1000, requires_grad=True)
        context = mg.offload_activations(folder=tmp_path, min_bytes=0)
        with context:
            y = x.exp().sum()
        (file,) = tmp_path.iterdir()
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[100] ^= 4
            with open(file, "r+b") as opened:
                opened.write(content)
        else:
            with open(file, "r+b") as opened:
                opened.truncate(500)
        with pytest.raises(RuntimeError, match=said) as caught:
            y.backward()
        assert str(file) in str(caught.value)
        del y, context, caught
        gc.collect()


def test_a_full_disk_is_an_error_that_names_the_file():
    """A file system of 256 KiB."""
    import subprocess
    import sys

    folder = pathlib.Path("/tmp") / f"monograph-small-disk-{threading.get_native_id()}"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip("mount is not allowed here")
    program = f"""
import torch, monograph as mg
x = torch.randn(100_000, requires_grad=True)
want = torch.autograd.grad(x.exp().sum(), x)[0]
with mg.offload_activations(folder={str(folder)!r}, min_bytes=0):
    try:
        x.exp()
    except RuntimeError as error:
        assert "No space left" in str(error) and {str(folder)!r} in str(error), error
        print("named")
    small = torch.randn(1000, requires_grad=True)
    y = small.exp().sum()
y.backward()
assert torch.equal(small.grad, small.exp())
print("goes on")
"""
    try:
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert run.stdout.split("\n")[:2] == ["named", "goes on"], run.stderr
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def test_a_killed_process_leaves_a_file_that_the_next_run_removes(tmp_path):
    import signal
    import subprocess
    import sys

    program = f"""
import os, signal, torch, monograph as mg
x = torch.randn(100_000, requires_grad=True)
with mg.offload_activations(folder={str(tmp_path)!r}):
    y = x.repeat(10).exp()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    alive = mg.offload_activations(folder=tmp_path, min_bytes=0)
    with alive:
        y = torch.randn(100, requires_grad=True).exp().sum()
    run = subprocess.run([sys.executable, "-c", program])
    assert run.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    after = mg.offload_activations(folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # that of the living one and the new one
    y.backward()
    del alive, after
    gc.collect()
    assert list(tmp_path.iterdir()) == []
