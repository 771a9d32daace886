"""OwnCounts: the numbers of steps by which AdamW corrects the moments of parameters that came at other times.

A parameter that joins at step 1000 with zero moments has made no step: corrected as if it had made 1000, its
first update would be up to (1 - beta1) / sqrt(1 - beta2) = 3.2 times the rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch


class OwnCounts:
    """groups: sizes of the parts of the flat tensor that are updated as one; decayed: whether each is pulled
    to zero. steps: one count for each, None as long as all parameters have made every step. joined: for each
    parameter the steps before it came, empty if all are 0."""

    def __init__(self, sizes: Sequence[int], decayed: int) -> None:
        self._sizes, self._decayed = list(sizes), decayed
        self.joined: list[float] = []
        self.steps: torch.Tensor | None = None
        self.groups = [decayed, sum(sizes) - decayed]
        self.decayed = [True, False]

    def set(self, joined: Sequence[float], steps: torch.Tensor) -> None:
        """steps: those of the step itself."""
        if not any(joined):
            self.__init__(self._sizes, self._decayed)  # type: ignore[misc]
            return
        self.joined = list(joined)
        begins = [sum(self._sizes[:number]) for number in range(len(self._sizes))]
        keys = [(begin < self._decayed, count) for begin, count in zip(begins, joined, strict=True)]
        runs = [(key, [n for n, _ in run]) for key, run in groupby(enumerate(keys), key=lambda pair: pair[1])]
        self.groups = [sum(self._sizes[n] for n in run) for _, run in runs]
        self.decayed = [decayed for (decayed, _), _ in runs]
        self._before = runs[0][0][1]
        self.steps = torch.stack([steps - count for (_, count), _ in runs])

    def tell(self, steps: torch.Tensor) -> None:
        """Brings the count of the step itself up to date."""
        if self.steps is not None:
            steps.copy_(self.steps[0] + self._before)
