"""The clock of paired rounds."""

import time

from monograph.bench.rounds import paired_rounds


def test_processor_time_leaves_out_what_the_thread_does_not_compute() -> None:
    works = {"ours": lambda: time.sleep(0.02), "peer": lambda: sum(range(50_000))}
    by_the_clock = paired_rounds(works, "ours", 3)
    computed = paired_rounds(works, "ours", 3, clock=time.thread_time)
    assert by_the_clock.best_ms["ours"] >= 20
    assert computed.best_ms["ours"] < 10
    assert computed.best_ms["peer"] > 0
