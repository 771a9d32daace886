"""One training run for the bench base_memory, in the control groups of its caller's choice. JSON on stdout.

A process of its own: memory, the page cache's charges and the bytes read are the process's.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

MADV_SEQUENTIAL = 2


def _bytes_read() -> int:
    """From storage, by all threads."""
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["read_bytes"])


def _stolen() -> float:
    """Seconds that the host of a virtual machine gave to others, of all processors together."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def _advise_sequential(model: Any) -> None:
    from monograph.memory.base_memory.mapped_base import mapped_tensors
    from monograph.memory.mapped_memory import MappedMemory

    libc = ctypes.CDLL(None)
    with MappedMemory() as memory:
        for tensor in mapped_tensors(model, memory):
            begin = tensor.address // 4096 * 4096
            libc.madvise(
                ctypes.c_void_p(begin),
                ctypes.c_size_t(tensor.address - begin + tensor.nbytes),
                MADV_SEQUENTIAL,
            )


def train(how: str, folder: str, steps: int, tokens: int, base_memory: int, threads: int) -> dict[str, Any]:
    """how: plain, sequential or ahead. The first step, which traces, is left out of the times."""
    import torch
    from peft import LoraConfig

    import monograph as mg
    from monograph.memory.base_memory import base_memory_of
    from monograph.packing import PackedCollator
    from monograph.training import TrainStep

    torch.set_num_threads(threads)
    model = mg.from_pretrained(folder, base_memory=base_memory if how == "ahead" else None)
    if how == "sequential":
        _advise_sequential(model)
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    wrapped = mg.add_lora(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    step = TrainStep(wrapped, mode="graph", dynamic=False)
    generator = torch.Generator().manual_seed(1)
    collate = PackedCollator(pad_to_multiple_of=tokens, max_documents=8)
    memory = base_memory_of(wrapped)
    found: list[dict[str, Any]] = []
    for _ in range(steps + 1):
        lengths = [tokens // 3, tokens // 3, tokens - 2 * (tokens // 3)]
        high = model.config.vocab_size
        ids = [torch.randint(0, high, (n,), generator=generator).tolist() for n in lengths]
        read, waited = _bytes_read(), memory.numbers.waited if memory else 0.0
        stolen = _stolen()
        clock, began, processor = time.monotonic(), time.perf_counter(), time.process_time()
        result = step([collate([{"input_ids": row} for row in ids])], 1e-4)
        found.append(
            {
                "seconds": time.perf_counter() - began,
                "processor": time.process_time() - processor,
                "stolen": _stolen() - stolen,
                "clock": clock,
                "read": _bytes_read() - read,
                "waited": (memory.numbers.waited if memory else 0.0) - waited,
                "loss": result.loss.item(),
                "grad_norm": result.grad_norm.item(),
            }
        )
    return {
        "steps": found,
        "base": memory.nbytes if memory else 0,
        "most_held": memory.numbers.most_held if memory else 0,
        "events": [[e.kind, e.unit, e.begin, e.end, e.nbytes] for e in memory.events()] if memory else [],
    }


if __name__ == "__main__":
    print(json.dumps(train(**json.loads(sys.argv[1]))))
