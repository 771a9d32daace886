"""Loading a model on 4-bit weights: time and memory, against transformers with bitsandbytes.

`packed`: a folder in bitsandbytes' files, by `mg.from_pretrained` and by transformers. `quantise`: a folder
in bf16, quantised while it loads, by `mg.MonographConfig` and by `BitsAndBytesConfig`. Qwen3-0.6B with random
weights. Each load is a process of its own; ours and the peer take turns, the folder is in the page cache.
The clock starts after the imports. `ready` is the load and one forward of 16 tokens: a mapped weight is read
when it is first used. Peaks are rises from the imports to `ready`: `anonymous` is RssAnon (memory that only
this process has), sampled every 2 ms; `resident` is VmHWM, which also counts mapped pages of the file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from monograph.bench.report import Report
from monograph.bench.rounds import Paired
from monograph.bench.step import QWEN, make_folder

CASES = ("packed", "quantise")

_LOAD = """
import sys, time, json, torch, transformers
who, case, folder, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
out, sys.stdout = sys.stdout, sys.stderr
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # both sides' imports before the clock
if who == "ours":
    from monograph import MonographConfig, from_pretrained
    kind = {"quantization": MonographConfig("nf4", double_quant=True)} if case == "quantise" else {}
    load = lambda: from_pretrained(folder, **kind)
else:
    import bitsandbytes, transformers.integrations.bitsandbytes
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    kind = {"quantization_config": config} if case == "quantise" else {}
    load = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kind)

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

ids = torch.arange(16)[None]
torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))  # threads and oneDNN are there
before = {"anonymous": status("RssAnon"), "resident": status("VmRSS")}
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the high-water mark
print(json.dumps(before), file=out, flush=True)
sys.stdin.readline()
begin, used = time.perf_counter(), time.process_time()
model = load()
loaded = time.perf_counter()
with torch.no_grad():
    logits = model(ids).logits
ready = time.perf_counter()
print(json.dumps({
    "load": loaded - begin, "ready": ready - begin, "processor": time.process_time() - used,
    "resident": status("VmHWM") - before["resident"], "kept": status("RssAnon") - before["anonymous"],
    "logit": float(logits[0, -1].float().abs().max()),
}), file=out, flush=True)
"""


def anonymous_bytes(process: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return 0
    lines = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return next((int(line.split()[1]) * 1024 for line in lines), 0)


def load_once(who: str, case: str, folder: str, threads: int) -> dict[str, float]:
    """Seconds and bytes of one load in a fresh process."""
    command = [sys.executable, "-c", _LOAD, who, case, folder, str(threads)]
    with tempfile.TemporaryFile() as log:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        peak = [0]

        def watch() -> None:
            while process.poll() is None:
                peak[0] = max(peak[0], anonymous_bytes(process.pid))
                time.sleep(0.002)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        if lines[0]:
            process.stdin.write("go\n")
            process.stdin.flush()
            lines.append(process.stdout.readline())
        process.communicate()
        watcher.join()
        if not all(lines):
            log.seek(0)
            raise RuntimeError(f"{who}, {case}: the process ended: {log.read().decode()[-2000:]}")
    before, found = json.loads(lines[0]), json.loads(lines[1])
    return found | {"anonymous": peak[0] - before["anonymous"]}


def run(arguments: argparse.Namespace, report: Report) -> None:
    config: dict[str, Any] = QWEN | {"num_hidden_layers": 2 if arguments.quick else 28}
    if arguments.quick:
        config |= {"vocab_size": 32000}
    cases = [case for case in CASES if case in (arguments.case or CASES)]
    if not cases:
        raise ValueError(f"--case is {','.join(arguments.case)}, wanted some of {', '.join(CASES)}")
    summary: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(arguments.folder or temporary) / ("load_quick" if arguments.quick else "load")
        packed = make_folder(config, root, keep_dense=True)
        for case in cases:
            folder = packed if case == "packed" else str(root / "dense")
            for threads in arguments.threads[:1] if arguments.quick else arguments.threads:
                rounds = [
                    {who: load_once(who, case, folder, threads) for who in ("ours", "bitsandbytes")}
                    for _ in range(2 if arguments.quick else 3)
                ]
                summary |= numbers(f"{case}_{threads}_threads", rounds)
                line = {"case": case, "layers": config["num_hidden_layers"], "threads": threads}
                best = {who: min(r[who]["ready"] for r in rounds) * 1e3 for who in rounds[0]}
                ratio = statistics.median(r["bitsandbytes"]["ready"] / r["ours"]["ready"] for r in rounds)
                report.case(line, Paired(best, {"bitsandbytes": ratio}, 0, 0.0), "ours")
    report.summary(summary)


def numbers(prefix: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Medians of both, and the peer's over ours in paired rounds; memory in MiB, ours over the peer's."""
    logits = [found["logit"] for r in rounds for found in r.values()]
    if max(logits) > 1.1 * min(logits):
        raise RuntimeError(f"{prefix}: the largest logits are {logits}, wanted about the same of both")
    summary = {}
    for who in rounds[0]:
        for name, unit in (("load", 1), ("ready", 1), ("anonymous", 2**20), ("resident", 2**20)):
            end = "seconds" if unit == 1 else "MiB"
            summary[f"{prefix}_{who}_{name}_{end}"] = statistics.median(r[who][name] for r in rounds) / unit
    for name in ("load", "ready", "processor"):
        summary[f"{prefix}_{name}_ratio"] = statistics.median(
            r["bitsandbytes"][name] / r["ours"][name] for r in rounds
        )
    for name in ("anonymous", "resident"):
        summary[f"{prefix}_{name}_over_bitsandbytes"] = statistics.median(
            r["ours"][name] / r["bitsandbytes"][name] for r in rounds
        )
    return summary
