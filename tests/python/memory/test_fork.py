"""A forked child, a worker of a DataLoader, takes the registries of its parent: nothing hangs under load."""

import os
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import monograph.ops  # noqa: F401  registers the operators

SIZE = 1 << 14


@pytest.fixture
def spilling(tmp_path):
    """A spill file, and two threads that write, read and drop without end."""
    ops = torch.ops.monograph
    file = ops.spill_open(torch.tensor(list(str(tmp_path).encode()), dtype=torch.uint8))
    x, stop = torch.randn(SIZE), threading.Event()

    def work():
        while not stop.is_set():
            handle = ops.reload(ops.offload(x, file, 0), x)
            assert torch.equal(ops.wait(handle, x, [SIZE], torch.float32), x)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield ops, file, x
    stop.set()
    for thread in threads:
        thread.join()
    ops.spill_close(file)


def exit_code(child, seconds=20):
    """Of a child; None if it hung and was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def test_a_child_reads_and_frees_what_its_parent_has_spilled(spilling):
    ops, file, x = spilling
    handles = [ops.offload(x, file, 0) for _ in range(4)]
    for _ in range(60):
        child = os.fork()
        if child == 0:
            same = torch.equal(ops.wait(handles[0], x, [SIZE], torch.float32), x)
            del handles  # the child lets go of its copies
            os._exit(0 if same else 1)
        assert exit_code(child) == 0
    assert all(torch.equal(ops.wait(handle, x, [SIZE], torch.float32), x) for handle in handles)


class Rows(Dataset):
    """Rows whose worker frees a handle that it has from its parent."""

    def __init__(self, handle):
        self.handle = handle

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.handle = None
        return torch.full((2,), index)


def test_workers_of_a_data_loader_start_and_end_while_others_spill(spilling):
    ops, file, x = spilling
    for _ in range(5):
        rows = DataLoader(
            Rows(ops.offload(x, file, 0)), num_workers=2, timeout=30, multiprocessing_context="fork"
        )
        assert [row[0, 0].item() for row in rows] == [0, 1, 2, 3]
