"""Proof that a layer's Python code has no effect and reads nothing that a trace would not notice.

Before a layer is traced it runs once on tensors without memory and is observed. What it assigns, draws and
asks for is put back and is why it cannot be a region; what it reads becomes part of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from monograph.training.regions.layer_function import Request, run
from monograph.training.regions.observer import Observer
from monograph.training.regions.reads import Reads, reads_of
from monograph.upstream.torch_names import FakeTensorMode

_SHOWN = 3


class Purity:
    """reads: what a trace relies on, once the layer has run."""

    reads: Reads

    def __init__(self, request: Request, differentiated: bool) -> None:
        self._observer = Observer(request.layer)
        self._failed: Exception | None = None
        try:
            _run_once(request, differentiated, self._observer)
        except Exception as error:  # tracing will say it in its own words
            self._failed = error
        self._observer.finish()
        self._refuse_changes()
        self.reads = reads_of(self._observer)

    @contextmanager
    def holds(self) -> Iterator[None]:
        """Around the tracing itself: what backward assigns is seen, and nothing stays of a failure."""
        try:
            yield
        except BaseException:
            self._observer.put_back()
            raise
        self._refuse_changes()
        if self._failed is not None:
            raise ValueError(f"without memory it fails: {self._failed}")

    def _refuse_changes(self) -> None:
        if changes := self._observer.changes():
            self._observer.put_back()
            more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
            raise ValueError(
                f"{', '.join(changes[:_SHOWN])}{more}, which a trace would do once for all calls"
            )


def _run_once(request: Request, differentiated: bool, observer: Observer) -> None:
    mode = FakeTensorMode()
    given = [*request.activations, *([] if request.seed is None else [request.seed])]

    def faked(tensors: list[torch.Tensor], wanted: bool = False) -> list[torch.Tensor]:
        found = [mode.from_tensor(t.detach(), static_shapes=True) for t in tensors]
        return [t.requires_grad_(wanted and t.is_floating_point()) for t in found]

    activations = faked(given[: len(request.activations)])
    seed = None if request.seed is None else faked([request.seed])[0]
    activations[0].requires_grad_(differentiated)
    trained, frozen = faked(request.trained, differentiated), faked(list(request.frozen.values()))
    with mode, torch.set_grad_enabled(differentiated), request.autocast(), observer.watching():
        run(request, activations, seed, trained, frozen)
