"""One contender of `monograph.bench step` in a process of its own: builds, warms up, then steps on command.

    python -m monograph.bench.step_contender '{"case": "b", "contender": "ours", "folder": "...", ...}'

Prints one JSON object per line: first {"loss", "load_s", "first_step_s"}, then for each line "step" read from
stdin {"ms", "cpu_ms", "loss"}, for "profile" {"profile": [[operator, ms, calls], ...]}, for "memory" the
{"resident", "anonymous"} MiB of this process: the most it ever held, and what it holds beyond mapped files.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from monograph.packing import PackedCollator, PaddedCollator
from monograph.recipe.config.compile_options import compile_options

Step = Callable[[], float]

RANK = 16
LEARNING_RATE = 2e-4
CHECKPOINTING = {"use_reentrant": False}


def documents(lengths: list[int], vocabulary: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, vocabulary, (n,), generator=generator)} for n in lengths]


def lora() -> LoraConfig:
    return LoraConfig(
        r=RANK, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def ours(job: dict[str, Any]) -> Step:
    import monograph as mg
    from monograph.training import TrainStep

    model = mg.from_pretrained(job["folder"])
    wrapped = get_peft_model(model, lora())
    if job["checkpointing"]:
        model.gradient_checkpointing_enable(CHECKPOINTING)
    mg.optimize(wrapped, elementwise=job.get("elementwise"))
    data = documents(job["lengths"], model.config.vocab_size, job.get("seed", 0))
    batch = PackedCollator(pad_to_multiple_of=sum(job["lengths"]), max_documents=16)(data)
    step = TrainStep(wrapped, mode=job["mode"], dynamic=False)
    return lambda: float(step([batch], LEARNING_RATE).loss)


def peer(job: dict[str, Any]) -> Step:
    """transformers + PEFT + bitsandbytes as TRL trains it: adapters in bf16, fused AdamW, norm clipped at 1.

    TRL's fused head is added to the model before PEFT, as its trainers do.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    vocabulary = model.config.vocab_size
    fused = {}
    if job["chunked_loss"]:
        from monograph.upstream.trl_names import add_fused_lm_head

        add_fused_lm_head(model)
        fused = {"fused_lm_head": True}
    wrapped: Any = get_peft_model(model, lora())
    if job["checkpointing"]:
        wrapped.gradient_checkpointing_enable(CHECKPOINTING)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    data = documents(job["lengths"], vocabulary)
    batch = PackedCollator()(data) if job["packed"] else PaddedCollator()(data)
    wanted = ("input_ids", "labels", "position_ids", "attention_mask", "num_items_in_batch")
    inputs = {name: batch[name] for name in wanted if name in batch} | {"use_cache": False} | fused
    call = torch.compile(wrapped) if job["compiled"] else wrapped
    wrapped.train()

    def step() -> float:
        loss = call(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def profile(step: Step) -> list[list[Any]]:
    """Operators by the processor time spent in themselves, largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        step()
    events = sorted(record.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [[event.key, round(event.self_cpu_time_total / 1e3, 1), event.count] for event in events[:25]]


def memory() -> dict[str, float]:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    sizes = {"resident": "VmHWM", "anonymous": "RssAnon"}
    return {name: int(fields[key].split()[0]) / 2**10 for name, key in sizes.items()}


def main() -> None:
    job = json.loads(sys.argv[1])
    with compile_options(job.get("options")):
        _answer(job)


def _answer(job: dict[str, Any]) -> None:
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print, too
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job.get("seed", 0))
    start = time.perf_counter()
    step = ours(job) if job["contender"] == "ours" else peer(job)
    loaded = time.perf_counter()
    loss = step()
    first = time.perf_counter()
    step()  # the second call of a compiled backward still settles
    print(json.dumps({"loss": loss, "load_s": loaded - start, "first_step_s": first - loaded}), file=out)
    out.flush()
    for line in sys.stdin:
        if line.strip() == "profile":
            answer: dict[str, Any] = {"profile": profile(step)}
        elif line.strip() == "memory":
            answer = memory()
        else:
            begin, used = time.perf_counter(), time.process_time()
            loss = step()
            answer = {"ms": (time.perf_counter() - begin) * 1e3, "loss": loss}
            answer["cpu_ms"] = (time.process_time() - used) * 1e3
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
