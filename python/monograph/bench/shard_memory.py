"""What a rank of a sharded base needs: memory and bytes read while it loads, and memory while it trains.

    python -m monograph.bench shard_memory --folder /some/folder --json

Writes an NF4 Llama of 4.1 GB to `--folder` unless it is there, puts it out of the page cache and starts 4
ranks: to load and shard it; to train two steps; to train them again with a limit, RLIMIT_DATA, from where the
base is in memory. One more rank trains a whole copy that is not mapped with the same limit. Linux counts what
safetensors has mapped privately as data, so that the limit cannot stand while files are mapped. `--quick`:
0.2 GB.

Anonymous memory is RssAnon of /proc/self/status; bytes read are rchar (calls) and read_bytes (storage, with
what the kernel reads ahead) of /proc/self/io. The worst rank is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from monograph.bench.report import Report

RANKS, TOKENS, STEPS = 4, 64, 2
LAYERS, SIZES = 32, {"vocab_size": 32768}
QUICK_LAYERS, QUICK_SIZES = 4, {"vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632}
MIB = 2**20
_OWN_READS: list[int] = []


def status(key: str) -> int:
    """Bytes; RssAnon: memory that no file backs, VmData: what RLIMIT_DATA counts."""
    file = os.open("/proc/self/status", os.O_RDONLY)
    text = os.read(file, 1 << 16)
    os.close(file)
    _OWN_READS.append(len(text))
    lines = text.decode().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def bytes_read() -> dict[str, int]:
    """Those of looking at memory are left out: a thread does so hundreds of times a second."""
    with open("/proc/self/io") as file:
        found = dict(line.split(": ") for line in file.read().splitlines())
    return {"rchar": int(found["rchar"]) - sum(_OWN_READS), "read_bytes": int(found["read_bytes"])}


class Peak(threading.Thread):
    """The highest anonymous memory, and data, since it began, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.anonymous = self.data = 0
        self._done = threading.Event()

    def _look(self) -> None:
        self.anonymous = max(self.anonymous, status("RssAnon"))
        self.data = max(self.data, status("VmData"))

    def run(self) -> None:
        while not self._done.wait(0.003):
            self._look()

    def end(self) -> Peak:
        self._done.set()
        self.join()
        self._look()
        return self


def load(world: Any, folder: str) -> dict[str, Any]:
    """Loads and shards a base; growth of memory and bytes read."""
    import monograph as mg
    from monograph.distributed.file_ranges import read_small_tensors
    from monograph.distributed.shard import shard, sharded_units

    before, read_before = status("RssAnon"), bytes_read()
    peak = Peak()
    peak.start()
    read_small_tensors(folder)
    model = shard(mg.from_pretrained(folder).requires_grad_(False), world)
    grown, highest = status("RssAnon") - before, peak.end().anonymous - before
    read = {name: size - read_before[name] for name, size in bytes_read().items()}
    units = sharded_units(model).values()
    own = sum(unit.shard.numel() for unit in units if not unit.shard_holder)
    return {"shard": own, "grown": grown, "highest": highest, **read}


def train(world: Any, folder: str, sharded: bool, limit: int) -> dict[str, Any]:
    """Trains an adapter on shards, or on a copy of the base, with RLIMIT_DATA from there on; 0: none."""
    import torch
    from peft import LoraConfig

    import monograph as mg
    from monograph.distributed.shard import shard, sharded_units
    from monograph.training import TrainStep

    before = status("RssAnon")
    model = mg.from_pretrained(folder)
    model.gradient_checkpointing_enable()
    vocabulary = model.config.vocab_size
    torch.manual_seed(0)  # ranks begin alike
    wrapped = mg.add_lora(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if sharded:
        shard(wrapped, world)
    else:
        for parameter in wrapped.parameters():
            parameter.data = parameter.data.clone()
    units = [unit for unit in sharded_units(wrapped).values() if not unit.shard_holder]
    peak = Peak()
    peak.start()  # before the limit: without memory a thread begins and never says so
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    step = TrainStep(wrapped, mode="graph", dynamic=False, world=world)
    generator = torch.Generator().manual_seed(1)
    losses = []
    began = time.perf_counter()
    for _ in range(STEPS):
        rows = [torch.randint(0, vocabulary, (1, TOKENS), generator=generator) for _ in range(world.size)]
        batches = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]
        losses.append(float(step(batches, 1e-4).loss).hex())
    return {
        "shard": sum(unit.shard.numel() for unit in units),
        "unit": max((unit.shard_spec.layout.nbytes for unit in units), default=0),
        "trained": 4 * sum(p.numel() for p in wrapped.parameters() if p.requires_grad),
        "highest": peak.end().anonymous - before,
        "data": peak.data,
        "seconds": (time.perf_counter() - began) / STEPS,
        "losses": losses,
    }


def run_ranks(ranks: int, work: str, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank found; {"error": its last words} of those that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "monograph.bench.shard_memory", work, json.dumps(arguments)]
    started = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        environ = os.environ | shared | place
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=environ, text=True, **pipes))  # type: ignore[call-overload]
    found = []
    for process in started:
        out, errors = process.communicate()
        last = errors.strip().splitlines()[-1:] or [""]
        found.append(json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"error": last[0]})
    return found


def forget_pages(folder: pathlib.Path) -> None:
    """Puts the files out of the page cache, so that reading them is reading."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def largest(found: list[dict[str, Any]], name: str) -> int:
    return max(result[name] for result in found)


def run(arguments: argparse.Namespace, report: Report) -> None:
    from monograph.bench.large_model import write_model

    folder = pathlib.Path(arguments.folder or "build/shard-memory")
    if not (folder / "model.safetensors.index.json").exists():
        layers, sizes = (QUICK_LAYERS, QUICK_SIZES) if arguments.quick else (LAYERS, SIZES)
        write_model(folder, layers, **sizes)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    numbers = {"ranks": float(RANKS), "folder_mib": stored / MIB}
    for case in arguments.case or ("load", "train"):
        numbers |= {"load": _load_numbers, "train": _train_numbers}[case](folder, stored)
    report.summary(numbers)


def _load_numbers(folder: pathlib.Path, stored: int) -> dict[str, float]:
    forget_pages(folder)
    found = run_ranks(RANKS, "load", str(folder))
    _raise_errors(found)
    shard = found[0]["shard"]
    return {
        "shard_mib": shard / MIB,
        "load_grown_over_shard_mib": (largest(found, "grown") - shard) / MIB,
        "load_peak_over_shard_mib": (largest(found, "highest") - shard) / MIB,
        "load_rchar_over_shard_percent": 100 * (largest(found, "rchar") / shard - 1),
        "load_read_bytes_over_shard_percent": 100 * (largest(found, "read_bytes") / shard - 1),
    }


def _train_numbers(folder: pathlib.Path, stored: int) -> dict[str, float]:
    found = run_ranks(RANKS, "train", str(folder), True, 0)
    _raise_errors(found)
    shard, unit = found[0]["shard"], found[0]["unit"]
    # What a rank has needed, and a quarter of what a whole copy has more.
    limit = largest(found, "data") + (stored - shard) // 4
    limited = run_ranks(RANKS, "train", str(folder), True, limit)
    copies = run_ranks(1, "train", str(folder), False, limit)
    print(f"# a whole copy under the limit: {copies[0].get('error', 'no error')}", file=sys.stderr)
    highest = largest(found, "highest")
    return {
        "train_unit_mib": unit / MIB,
        "train_adapter_mib": found[0]["trained"] / MIB,
        "train_peak_over_shard_mib": (highest - shard) / MIB,
        "train_peak_over_shard_and_2_units_mib": (highest - shard - 2 * unit) / MIB,
        "step_seconds": found[0]["seconds"],
        "limit_mib": limit / MIB,
        "limited_sharded_ranks_that_end": float(sum("error" not in result for result in limited)),
        "limited_copies_that_end": float(sum("error" not in result for result in copies)),
        "limited_losses_equal": float(all(r.get("losses") == found[0]["losses"] for r in limited)),
    }


def _raise_errors(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        if "error" in result:
            raise RuntimeError(f"rank {rank}: {result['error']}")


def _rank(work: str, arguments: str) -> None:
    import torch
    import transformers  # noqa: F401  (imported before anything is measured)

    import monograph.hf.optimize
    import monograph.hf.transformers.loading  # noqa: F401
    from monograph.distributed import join, leave

    torch.set_num_threads(1)
    world = join(timeout=600)
    works: dict[str, Callable[..., dict[str, Any]]] = {"load": load, "train": train}
    found = works[work](world, *json.loads(arguments))
    print(json.dumps(found), flush=True)
    world.barrier()
    leave(world)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
