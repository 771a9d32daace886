"""Paired rounds: ours and every peer back to back, many times; the figure is the median of the ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monograph.bench.roofline import limit_tiles, limit_vectors

Work = Callable[[], object]
Clock = Callable[[], float]

# Four products of 16x32 by 32x16 a step: 20000 steps are about 0.5 ms on one core.
_TILE_STEPS = 20000
# Twelve vectors a step: as long with AVX-512, twice that with AVX2.
_VECTOR_STEPS = 150000


@dataclass
class Paired:
    """What the rounds gave: best times in ms, and peer time over ours as the median over rounds."""

    best_ms: dict[str, float]
    ratio: dict[str, float]
    repeated: int  # rounds thrown away because the unit that multiplies was slow
    tile_tflops: float  # best speed of the bare tile loop; 0 without AMX
    vector_tflops: float = 0.0  # of the bare loop of multiply-adds where there is no AMX


def _time(work: Work, repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        work()
    return (clock() - start) / repeats * 1e3


def _speed(loop: Callable[[int], float], steps: int, clock: Clock) -> float:
    start = clock()
    operations = loop(steps)
    return operations / (clock() - start) / 1e12


def bare_speed(clock: Clock = time.perf_counter) -> float:
    """TFLOP/s on this core, now, of the bare tile loop, of that of multiply-adds where there is no AMX."""
    return _speed(limit_tiles, _TILE_STEPS, clock) or _speed(limit_vectors, _VECTOR_STEPS, clock)


def paired_rounds(
    works: Mapping[str, Work],
    ours: str,
    rounds: int,
    least_ms: float = 2.0,
    watch_limit: bool = False,
    clock: Clock = time.perf_counter,
) -> Paired:
    """Times every work once a round, in turn, each repeated to last at least `least_ms`.

    With `watch_limit` each round also times the bare loop before and after; a round in which it is
    below 80 % of the run's best is repeated (at most three times as many rounds in all). With
    `time.thread_time` as `clock` what other jobs take from the processor is not counted, and neither are
    other threads.
    """
    repeats = {}
    for name, work in works.items():
        work()
        repeats[name] = max(1, int(least_ms / max(_time(work, 1, clock), 1e-4)))
    kept: list[tuple[float, dict[str, float]]] = []
    fastest, tried = 0.0, 0
    while tried < 3 * rounds:
        tried += 1
        before = bare_speed(clock) if watch_limit else 0.0
        times = {name: _time(work, repeats[name], clock) for name, work in works.items()}
        after = bare_speed(clock) if watch_limit else 0.0
        fastest = max(fastest, before, after)
        kept.append((min(before, after), times))
        good = [t for speed, t in kept if speed >= 0.8 * fastest]
        if len(good) >= rounds:
            break
    good = [t for speed, t in kept if speed >= 0.8 * fastest] or [t for _, t in kept]
    best = {name: min(t[name] for t in good) for name in works}
    ratio = {n: statistics.median(t[n] / t[ours] for t in good) for n in works if n != ours}
    tiles = limit_tiles(1) > 0
    return Paired(best, ratio, tried - len(good), fastest if tiles else 0.0, 0.0 if tiles else fastest)


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")
