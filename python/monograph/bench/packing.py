"""Packing of documents by length: ours against TRL's `pack_dataset` and axolotl's sampler, time and waste.

10 million documents go through ours alone; the peers, which take minutes, run on fewer. TRL's time
includes what it does beyond choosing rows: it copies the tokens (of one byte here) into a new dataset.
Waste is the share of the rows that holds no token; the summary has that of each peer minus ours on the same
lengths.
axolotl is a peer if `import axolotl` works (PYTHONPATH with its wheel and numba is enough).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from monograph.bench.report import Report
from monograph.bench.rounds import Paired, Work, paired_rounds
from monograph.packing import pack, pack_stream

CAPACITY = 4096
MEAN = 350


def log_normal_lengths(count: int, seed: int = 0) -> torch.Tensor:
    """Lengths of mean 350 with a long tail, as instruction data has them; none is longer than a row."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return (normal + math.log(MEAN) - 0.5).exp().long().clamp(1, CAPACITY)


def uniform_lengths(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, CAPACITY + 1, (count,), generator=torch.Generator().manual_seed(seed))


LENGTHS: dict[str, Callable[[int], torch.Tensor]] = {
    "log_normal": log_normal_lengths,
    "uniform": uniform_lengths,
}


def trl_row_count(lengths: torch.Tensor, batch_size: int) -> Callable[[], int]:
    """A call of TRL's packer on documents of these lengths. Its dataset is made beforehand."""
    import datasets
    import numpy
    import pyarrow

    from monograph.upstream.trl_names import pack_dataset

    datasets.disable_progress_bars()
    offsets = numpy.concatenate(([0], numpy.cumsum(lengths.numpy(), dtype=numpy.int64)))
    tokens = pyarrow.array(numpy.zeros(int(offsets[-1]), dtype=numpy.int8))
    column = pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), tokens)
    dataset = datasets.Dataset(pyarrow.table({"input_ids": column}))
    options = {"batch_size": batch_size, "load_from_cache_file": False, "keep_in_memory": True}
    return lambda: len(pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=options))


def axolotl_row_count(lengths: torch.Tensor) -> Callable[[], int] | None:
    """A call of axolotl's packer in one process with its default groups; None if it is not installed."""
    try:
        from axolotl.utils.samplers.multipack import pack_parallel
    except ImportError:
        return None
    array = lengths.numpy().astype("int32")
    limit = CAPACITY  # the most documents of a row; a row holds no more than tokens
    return lambda: len(pack_parallel(array, CAPACITY, 100_000, limit, num_processes=1))


def _waste(lengths: torch.Tensor, rows: int) -> float:
    return 1 - float(lengths.sum()) / (rows * CAPACITY)


def _compare(name: str, count: int, rounds: int, report: Report) -> dict[str, float]:
    """One set of lengths through everyone; returns how much more than ours each peer wastes, in percent."""
    lengths = LENGTHS[name](count)
    works: dict[str, Work] = {
        "ours": lambda: len(pack(lengths, CAPACITY)),
        "ours_first_fit": lambda: len(pack(lengths, CAPACITY, strategy="first_fit")),
        "trl": trl_row_count(lengths, count),
        "trl_by_1000": trl_row_count(lengths, 1000),  # the default of dataset.map
    }
    axolotl = axolotl_row_count(lengths)
    if axolotl is not None:
        works["axolotl"] = axolotl
    waste = {peer: _waste(lengths, int(work())) for peer, work in works.items()}  # type: ignore[call-overload]
    result = paired_rounds(works, "ours", rounds)
    percent = {peer: round(100 * share, 4) for peer, share in waste.items()}
    case: dict[str, Any] = {"lengths": name, "documents": count, "threads": 1, "waste_percent": percent}
    report.case(case, result, "ours")
    return {f"{peer}_waste_minus_ours_percent_{name}": 100 * (w - waste["ours"]) for peer, w in waste.items()}


def _ten_million(name: str, strategy: str, rounds: int, report: Report) -> float:
    """Best time in seconds for 10 million documents."""
    count = 10_000_000
    lengths = LENGTHS[name](count)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        rows = pack(lengths, CAPACITY, strategy=strategy)
        times.append((time.perf_counter() - start) * 1e3)
    percent = {"ours": round(100 * _waste(lengths, len(rows)), 4)}
    case = {"lengths": name, "documents": count, "threads": 1, "strategy": strategy, "waste_percent": percent}
    report.case(case, Paired({"ours": min(times)}, {}, 0, 0.0), "ours")
    return min(times) / 1e3


def _stream_waste(max_open: int) -> float:
    """Waste in percent of the online form over 100,000 documents."""
    lengths = log_normal_lengths(100_000)
    rows = pack_stream(lengths.tolist(), CAPACITY, length_of=int, max_open=max_open)
    return 100 * _waste(lengths, sum(1 for _ in rows))


def run(arguments: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    numbers: dict[str, float] = {}
    for name in LENGTHS:
        count = 5_000 if arguments.quick else 100_000
        numbers |= _compare(name, count, 1 if arguments.quick else 3, report)
    for strategy in ("best_fit_decreasing", "first_fit"):
        for name in LENGTHS:
            seconds = _ten_million(name, strategy, 2 if arguments.quick else 5, report)
            numbers[f"seconds_10m_{strategy}_{name}"] = seconds
    for max_open in (16, 64, 256):
        numbers[f"stream_{max_open}_open_waste_percent"] = _stream_waste(max_open)
    report.summary({name: value for name, value in numbers.items() if not name.startswith("ours_waste")})
