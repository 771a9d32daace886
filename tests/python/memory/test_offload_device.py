"""The logic of copies to and from a device, on a device that only writes down what it is told."""

from contextlib import contextmanager

import pytest
import torch

import monograph as mg
from monograph.memory.offload.device_copies import DeviceCopies


class Log:
    """A device whose streams run when somebody looks: an order that events do not force would be wrong."""

    def __init__(self):
        self.calls = []
        self.now = FakeStream(self, "main")
        self.made = 0

    def current_stream(self):
        return self.now

    def Stream(self):
        self.made += 1
        return FakeStream(self, f"side{self.made}")

    def Event(self):
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.calls.append(("wait", self.name, event))


class FakeEvent:
    def __init__(self, log):
        self.log, self.done, self.recorded = log, False, 0

    def record(self, stream):
        self.recorded += 1
        self.log.calls.append(("record", stream.name, self))

    def query(self):
        return self.done


def words(log):
    return [(what, stream) for what, stream, _ in log.calls]


def test_a_copy_comes_after_what_made_it_and_its_source_is_kept():
    log = Log()
    copies = DeviceCopies(log, most_pending=1, pinned=torch.empty_like)
    x = torch.arange(10, dtype=torch.uint8)
    token = copies.to_host(x)
    assert words(log) == [("record", "main"), ("wait", "side1"), ("record", "side1")]
    assert log.calls[1][2] is log.calls[0][2]  # the side waits for what the main stream has done
    assert [source is x for source, _ in copies._pending] == [True]
    log.calls.clear()
    second = copies.to_host(x + 1)
    # One too many: the computation waits for the oldest copy before its source may be used again.
    assert words(log)[-1] == ("wait", "main")
    assert log.calls[-1][2] is token.done
    assert len(copies._pending) == 1
    second.done.done = True
    copies.to_host(x)
    assert len(copies._pending) == 1  # what is finished is let go without waiting
    log.calls.clear()
    back = copies.to_device(token, torch.device("cpu"))
    assert torch.equal(back, x)
    # The memory is the main stream's: the side waits for it and for the copy out, main for the copy in.
    assert words(log) == [
        ("record", "main"),
        ("wait", "side2"),
        ("wait", "side2"),
        ("record", "side2"),
        ("wait", "main"),
    ]
    assert log.calls[2][2] is token.done
    assert log.calls[4][2] is log.calls[3][2]


class Elsewhere:
    """A copier under another name: what is "on the host" is a dictionary."""

    def __init__(self):
        self.host = {}

    def to_host(self, bytes):
        self.host[len(self.host)] = bytes.numpy().tobytes()
        return len(self.host) - 1

    def to_device(self, token, device):
        return torch.frombuffer(bytearray(self.host[token]), dtype=torch.uint8)


def test_host_memory_through_an_injected_copier(monkeypatch):
    from monograph.memory.offload import places

    monkeypatch.setattr(places.Host, "takes", lambda self, device: True)  # these tensors play the device's
    copier = Elsewhere()
    x = torch.randn(40, 30, requires_grad=True)
    want = torch.autograd.grad((x.tanh() @ x.t()).exp().sum(), x)[0]
    context = mg.offload_activations(to="host", copier=copier, min_bytes=0)
    with context:
        y = (x.tanh() @ x.t()).exp().sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], want)
    counts = context.counts()
    assert counts.writes == counts.reads == len(copier.host)
    assert counts.bytes_written == counts.bytes_read == sum(len(b) for b in copier.host.values())


def test_what_is_on_the_host_already_is_refused():
    with pytest.raises(ValueError, match="is on cpu already"):
        mg.offload.StorageOffloader("host", copier=Elsewhere()).offload({"a": torch.ones(3)})


def test_the_operators_of_a_device(monkeypatch):
    from monograph.memory.offload import device_copies

    log = Log()
    copies = DeviceCopies(log, pinned=torch.empty_like)
    monkeypatch.setattr(device_copies, "_copies", lambda op, tensor: copies)
    x = torch.randn(4, 6)
    handle = device_copies._offload(x, 0, 0)
    assert torch.equal(handle, x)
    # A graph gives x away now: the stream that computes waits for the copy.
    assert words(log)[-1] == ("wait", "main")
    assert not copies._pending
    begun = device_copies._reload(handle, x)
    assert torch.equal(device_copies._wait(begun, x, [4, 6], torch.float32), x)
    assert words(log)[-1] == ("wait", "main")
    with pytest.raises(RuntimeError, match="nothing was begun under number"):
        device_copies._wait(begun, x, [4, 6], torch.float32)
    begun = device_copies._reload(handle, x)
    with pytest.raises(RuntimeError, match=r"float32 \[4, 6\] came back, wanted torch.float32 \[24\]"):
        device_copies._wait(begun, x, [24], torch.float32)
