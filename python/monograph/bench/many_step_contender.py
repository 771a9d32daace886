"""One contender of `monograph.bench many_step` in a process of its own: warms up, then steps on command.

    python -m monograph.bench.many_step_contender '{"contender": "apart", "adapters": 4, "tokens": 64, ...}'

`singles`: the step of one adapter by TrainStep, made once for each. `apart`, `joined`: ManyStep with these
rows. Prints a JSON object a line: first {"first_step_s"}, then for each line "step" read from stdin
{"ms", "cpu_ms"}, for "memory" {"process_MiB", "above_MiB"}: the most that was resident, and how far that is
above what the interpreter and its libraries held, and for "profile" operators by their own processor time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import monograph as mg
from monograph.bench.step_contender import documents, lora, profile
from monograph.packing import PackedCollator
from monograph.training import TrainStep

LEARNING_RATE = 2e-4


def work_of(job: dict[str, Any]) -> Callable[[], float]:
    """A step of all adapters; each has one document of `tokens`."""
    base = mg.from_pretrained(job["folder"])
    count, tokens = job["adapters"], job["tokens"]
    collate = PackedCollator(max_documents=2)
    data = documents([tokens] * count, base.config.vocab_size)
    batches = [collate([document]) for document in data]
    if job["contender"] == "singles":
        step = TrainStep(mg.add_lora(base, lora()), mode=job["mode"])

        def singles() -> float:
            return [float(step([batch], LEARNING_RATE).loss) for batch in batches][-1]

        return singles
    runs = {f"adapter{i}": mg.AdapterRun(lora(), LEARNING_RATE, seed=i) for i in range(count)}
    many = mg.ManyStep(base, runs, mode=job["mode"], rows=job["contender"])
    given = {name: [batch] for name, batch in zip(runs, batches, strict=True)}
    return lambda: [float(result.loss) for result in many(given).values()][-1]


def resident(key: str) -> float:
    """MiB of this process."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[key].split()[0]) / 2**10


def main() -> None:
    job = json.loads(sys.argv[1])
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark
    start = time.perf_counter()
    step = work_of(job)
    step()
    first = time.perf_counter() - start
    step()  # the second call of a compiled backward still settles
    print(json.dumps({"first_step_s": first}), file=out, flush=True)
    for line in sys.stdin:
        answer: dict[str, Any]
        if line.strip() == "memory":
            answer = {"process_MiB": resident("VmHWM"), "above_MiB": resident("VmHWM") - before}
        elif line.strip() == "profile":
            answer = {"profile": profile(step)}
        else:
            begin, used = time.perf_counter(), time.process_time()
            step()
            answer = {"ms": (time.perf_counter() - begin) * 1e3}
            answer["cpu_ms"] = (time.process_time() - used) * 1e3
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
