"""What the self-test asks of a device: memory, streams, graphs, clocks, and the operators under test.

Tests put faults into a subclass; `HostDevice` is the CPU under the same interface.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.ops.dequantize import dequantize
from monograph.ops.formats import format_named
from monograph.ops.linear import linear, linear_dx
from monograph.ops.linear_cross_entropy import linear_cross_entropy
from monograph.ops.quantize import quantize
from monograph.upstream.torch_names import TorchDispatchMode, tree_leaves

Work = Callable[[], Any]
Scales = Sequence[torch.Tensor]


class Device:
    """A device by its torch name. Of the methods those without a body here are the device's own."""

    name: str

    @property
    def where(self) -> torch.device:
        return torch.device(self.name)

    def missing(self) -> str | None:
        """Why nothing can run; None if it can."""
        raise NotImplementedError

    def hardware(self) -> dict[str, Any]:
        """For the report: what the card is. No name of the machine or its user."""
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError

    def on_side_stream(self, work: Work) -> Any:
        """`work()` on another stream than the current one; each of the two waits for the other."""
        raise NotImplementedError

    def captured(self, work: Work) -> tuple[Any, Work]:
        """What `work()` gives, captured as a graph, and what replays it into the same memory."""
        raise NotImplementedError

    def peak_bytes(self, work: Work) -> int:
        """The most memory that `work()` held beyond what was held before."""
        raise NotImplementedError

    def clocks(self) -> dict[str, Any]:
        """Clock rates and temperature now, as far as the device tells."""
        return {}

    def milliseconds(self, work: Work, repeats: int) -> float:
        """Of one call, all of its work included."""
        self.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronize()
        return (time.perf_counter() - began) / repeats * 1e3

    # The operators under test.

    def quantize(self, weight: torch.Tensor, format: str, double_quant: bool) -> list[torch.Tensor]:
        fmt = format_named(format)
        return quantize(weight, fmt.number, fmt.default_block, double_quant, False, 0, 0)

    def dequantize(
        self, values: torch.Tensor, scales: Scales, layout: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return dequantize(values, scales, layout, dtype)

    def dequantize_out(
        self, values: torch.Tensor, scales: Scales, layout: Sequence[int], out: torch.Tensor
    ) -> None:
        dequantize(values, scales, layout, out=out)

    def linear(
        self, x: torch.Tensor, values: torch.Tensor, scales: Scales, layout: Sequence[int], *rest: Any
    ) -> torch.Tensor:
        return linear(x, values, scales, layout, *rest)

    def linear_dx(
        self, dy: torch.Tensor, values: torch.Tensor, scales: Scales, layout: Sequence[int]
    ) -> torch.Tensor:
        return linear_dx(dy, values, scales, layout)

    def loss(self, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, [], [0, 0, *weight.shape], labels)


class PeakMemory(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that operators make inside it and that live at one time; a kernel's own scratch
    is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is_dense(t)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if _is_dense(t) and (at := t.untyped_storage().data_ptr()) not in given | self._known:
                self._hold(t.untyped_storage(), at)
        return out

    def _hold(self, storage: torch.UntypedStorage, at: int) -> None:
        size = storage.nbytes()
        self._known.add(at)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._let_go, at, size)

    def _let_go(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size


def _is_dense(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout is torch.strided and t.device.type != "meta"


class HostDevice(Device):
    """The CPU; side streams are threads, a captured graph is the call itself."""

    name = "cpu"

    def missing(self) -> str | None:
        return None

    def hardware(self) -> dict[str, Any]:
        return {"name": "cpu", "architecture": "cpu"}

    def synchronize(self) -> None:
        pass

    def on_side_stream(self, work: Work) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()
        return found[0]

    def captured(self, work: Work) -> tuple[torch.Tensor, Work]:
        out = work()
        return out, lambda: out.copy_(work())

    def peak_bytes(self, work: Work) -> int:
        with PeakMemory() as found:
            work()
        return int(found.peak)


class CudaDevice(Device):
    """A card behind torch.cuda, of NVIDIA or AMD."""

    name = "cuda"

    def missing(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "torch.cuda.is_available() is False: no card or driver"

    def hardware(self) -> dict[str, Any]:
        if self.missing():
            return {}
        found = torch.cuda.get_device_properties(self.where)
        return {
            "name": found.name,
            "architecture": getattr(found, "gcnArchName", "") or f"sm_{found.major}{found.minor}",
            "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count,
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def on_side_stream(self, work: Work) -> Any:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = work()
        current.wait_stream(side)
        return out

    def captured(self, work: Work) -> tuple[Any, Work]:
        self.on_side_stream(work)  # torch wants a warm-up before capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = work()
        return out, graph.replay

    def peak_bytes(self, work: Work) -> int:
        work()  # handles and workspaces of libraries are made once
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        self.synchronize()
        del kept
        return int(torch.cuda.max_memory_allocated() - before)

    def clocks(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        asked = {"sm_mhz": "clock_rate", "temperature": "temperature", "power_mw": "power_draw"}
        for name, function in asked.items():
            try:
                found[name] = getattr(torch.cuda, function)()
            except Exception as error:  # they need NVML, which a container may lack
                found[name] = f"not told: {type(error).__name__}"
        return found

    def milliseconds(self, work: Work, repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / repeats


DEVICES: dict[str, type[Device]] = {"cuda": CudaDevice, "cpu": HostDevice}
