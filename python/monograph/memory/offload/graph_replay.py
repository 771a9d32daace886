"""Captured device graphs beside copies: what waits for whom is said by events.

A replay is one launch, and what is recorded inside it at capture says nothing about this replay. So an event
is recorded behind each replay, forward and backward alike, on the stream that it ran on:

    layer = Replayed(capture, pre_warmup_hook=offloader_off, post_warmup_hook=offloader_on)
    layer.forward(cuda_graph_stream=stream, cuda_graph_event=event)
    copy_stream.wait_event(event)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monograph.memory.offload.device_copies import Device


class CapturedGraph(Protocol):
    def replay(self) -> None: ...


def replay(
    graph: CapturedGraph, device: Device, cuda_graph_stream: Any = None, cuda_graph_event: Any = None
) -> Any:
    """Replays on a stream, the current one if missing, and records an event behind it, which it returns.

    The replay comes after what the current stream has been given, and what the current stream is given from
    now on comes after the replay.
    """
    current = device.current_stream()
    stream = current if cuda_graph_stream is None else cuda_graph_stream
    event = device.Event() if cuda_graph_event is None else cuda_graph_event
    if stream is not current:
        before = device.Event()
        before.record(current)
        stream.wait_event(before)
    with device.stream(stream):
        graph.replay()
    event.record(stream)
    if stream is not current:
        current.wait_event(event)
    return event


class Replayed:
    """Forward and backward of a layer, captured after runs that warm up.

    capture: runs the layer once under capture and gives both graphs. warm_up: runs it once as it is.
    pre_warmup_hook and post_warmup_hook run before the first and behind the last of these runs: an offloader
    must not take what a warm-up keeps, and must be on again before anything is captured.
    """

    def __init__(
        self,
        device: Device,
        warm_up: Callable[[], None],
        capture: Callable[[], tuple[CapturedGraph, CapturedGraph]],
        *,
        warm_ups: int = 3,
        pre_warmup_hook: Callable[[], None] | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        if pre_warmup_hook is not None:
            pre_warmup_hook()
        try:
            for _ in range(warm_ups):
                warm_up()
        finally:
            if post_warmup_hook is not None:
                post_warmup_hook()
        self._forward, self._backward = capture()

    def forward(self, cuda_graph_stream: Any = None, cuda_graph_event: Any = None) -> Any:
        return replay(self._forward, self._device, cuda_graph_stream, cuda_graph_event)

    def backward(self, cuda_graph_stream: Any = None, cuda_graph_event: Any = None) -> Any:
        return replay(self._backward, self._device, cuda_graph_stream, cuda_graph_event)
