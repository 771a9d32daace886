#!/usr/bin/env python3
"""Writes the tables of docs/explain/scale.md by the formulas of monograph.distributed.plan.

As a program:

    python tools/scale_page.py [--check]

With --check nothing is written, and the exit code is 1 if a table is not what the formulas give.
"""

from __future__ import annotations

import pathlib
import re
import sys
from functools import cache
from typing import Any

from monograph.distributed.plan import (
    FLOAT,
    Link,
    Mesh,
    Plan,
    Sizes,
    Step,
    make_plan,
    routed_bytes,
    sliced_saving,
)

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "explain" / "scale.md"

RANK = 16
TOKENS = 4096
TERAFLOPS = 400
HOP = 10e-6  # seconds
GIGABIT = 1e9 / 8
RATES = {"25 Gbit/s": 25 * GIGABIT, "100 Gbit/s": 100 * GIGABIT, "400 Gbit/s": 400 * GIGABIT, "NVLink": 450e9}

_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
# The numbers of the published config.json files. Those of DeepSeek-V3 and gpt-oss-120b are the defaults of
# transformers' classes.
LLAMAS: dict[str, dict[str, Any]] = {
    "8B": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": _LLAMA
    | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}
QWEN3_235B = {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
_NETWORKS = tuple(RATES)[:3]
ON_ATTENTION = "671B, LoRA on attention"
MODELS = (*LLAMAS, "671B")
_ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def config_of(name: str, **changes: Any) -> Any:
    """Llama 3.1 of 8B, 70B or 405B, DeepSeek-V3 (671B), Qwen3-235B-A22B, gpt-oss-120b."""
    from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

    if name in LLAMAS:
        return LlamaConfig(**LLAMAS[name] | changes)
    if name == "Qwen3-235B-A22B":
        return Qwen3MoeConfig(**QWEN3_235B | changes)
    return (GptOssConfig if name == "gpt-oss-120b" else DeepseekV3Config)(**changes)


@cache
def sizes_of(name: str) -> Sizes:
    from monograph.distributed.model_sizes import read_sizes
    from monograph.hf.peft.meta_adapter import with_meta_adapter
    from monograph.hf.transformers.config import MonographConfig
    from monograph.hf.transformers.meta_model import meta_model

    model = meta_model(config_of(name), MonographConfig("nf4", double_quant=True))
    return read_sizes(with_meta_adapter(model, RANK, _ATTENTION if name == ON_ATTENTION else "all-linear"))


@cache
def plan_of(name: str, ranks: int, shard: int) -> Plan:
    """One micro-batch for each rank."""
    return make_plan(sizes_of(name), Mesh(ranks, shard), Step(TOKENS, ranks))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _gb(size: float) -> str:
    if size == 0:
        return "0"
    return (
        f"{size / 1e9:.2f}" if size < 10e9 else f"{size / 1e9:,.1f}" if size < 1e11 else f"{size / 1e9:,.0f}"
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _models() -> str:
    rows = []
    for name in (*MODELS, ON_ATTENTION):
        sizes = sizes_of(name)
        layer = max(unit.layout(1).tensor_bytes for unit in sizes.units if unit.layer)
        ends = sum(unit.layout(1).tensor_bytes for unit in sizes.units if not unit.layer)
        state = 3 * FLOAT * sizes.trained
        row = [name, str(sizes.layers), _gb(sizes.base_bytes), _gb(layer), _gb(ends)]
        rows.append([*row, f"{sizes.active / 1e9:.1f}", f"{sizes.trained / 1e6:,.0f}", _gb(state)])
    head = ["model", "layers", "base", "largest layer", "embedding and head", "active weights, 10^9"]
    return _table([*head, "trained, 10^6", "adapter and moments"], rows)


def _memory() -> str:
    shards = (8, 64, 512, 4096)
    rows = []
    for name in (*MODELS, ON_ATTENTION):
        plans = [plan_of(name, shard, shard) for shard in shards]
        memory = plans[0].memory
        activations = sum(memory[part] for part in ("layer inputs", "one layer", "logits"))
        parts = (memory["gathered"], memory["adapter"] + memory["moments"], memory["gradients"], activations)
        rows.append([name, *map(_gb, parts), *(_gb(plan.memory["shard"]) for plan in plans)])
        rows[-1] += [_gb(plan.held) for plan in plans]
    head = ["model", "gathered", "adapter, moments", "gradients", "activations"]
    head += [f"shard of {shard}" for shard in shards]
    return _table([*head, *(f"all, {shard}" for shard in shards)], rows)


MESHES = ((8, 8), (64, 64), (64, 8), (512, 512), (512, 8), (4096, 4096), (4096, 64), (4096, 8))


def _time() -> str:
    rows = []
    for name in MODELS:
        for ranks, shard in MESHES:
            plan = plan_of(name, ranks, shard)
            base = sum(c.moved for c in plan.gathers)
            row = [name, str(ranks), str(shard), _gb(base), _gb(plan.moved - base), str(plan.calls)]
            row += [_seconds(plan.seconds(Link(RATES[link], HOP))) for link in _NETWORKS]
            inside = plan.seconds(Link(RATES["400 Gbit/s"], HOP), Link(RATES["NVLink"], HOP))
            row.append(_seconds(inside) if shard == 8 else "")
            rows.append([*row, _seconds(plan.flops / (TERAFLOPS * 1e12))])
    head = ["model", "ranks", "shard", "base, GB", "gradient, GB", "collectives"]
    head += [f"{link}, s" for link in _NETWORKS]
    return _table([*head, "NVLink inside, 400 outside, s", "computing, s"], rows)


def _first_limit() -> str:
    rows = []
    for name in MODELS:
        plan, memory = plan_of(name, 64, 64), plan_of(name, 8, 8).memory
        computing = plan.flops / (TERAFLOPS * 1e12)
        gathering = {
            link: sum(c.seconds(Link(rate, HOP)) for c in plan.gathers) for link, rate in RATES.items()
        }
        largest = max(memory, key=lambda part: memory[part])
        row = [name, f"{largest}, {100 * memory[largest] / sum(memory.values()):.0f} %"]
        row += [f"{gathering[link] / computing:.1f}" for link in RATES]
        rows.append([*row, f"{TOKENS * gathering['400 Gbit/s'] / computing:,.0f}"])
    return _table(["model", "largest", *RATES, "balance, tokens"], rows)


def _experts() -> str:
    rows = []
    for name, title in (("671B", "DeepSeek-V3"), ("Qwen3-235B-A22B", ""), ("gpt-oss-120b", "")):
        sizes, config = sizes_of(name), config_of(name)
        gathered = sum(c.moved for c in plan_of(name, 64, 64).gathers)
        layers = sizes.layers - getattr(config, "first_k_dense_replace", 0)
        routed = routed_bytes(layers, config.hidden_size, config.num_experts_per_tok, sizes.float_bytes)
        rows.append([title or name, _gb(sizes.base_bytes), _gb(gathered)])
        rows[-1] += [f"{routed / 1e6:.1f}", f"{gathered / routed:,.0f}"]
    return _table(["model", "base, GB", "gathered, GB", "sent for a token, MB", "tokens"], rows)


def _spread() -> str:
    rows = []
    for name, title in (("671B", "DeepSeek-V3"), ("Qwen3-235B-A22B", ""), ("gpt-oss-120b", "")):
        sizes = sizes_of(name)
        experts = sizes.experts
        if experts is None:
            raise ValueError(f"{name} has no packed experts")
        for ranks in (2, 4, 8, 64):
            base = sizes.base_bytes - experts.nbytes + experts.held_bytes(ranks)
            row = [title or name, str(ranks), _gb(base), _gb(experts.buffer_bytes(ranks, TOKENS))]
            row += [f"{experts.ranks_of_a_token(ranks):.2f}", f"{experts.slots_of_a_token(ranks):.2f}"]
            row += [f"{experts.sent_for_a_token(ranks) / 1e6:.2f}"]
            row += [f"{experts.each_slot_alone(ranks) / 1e6:.2f}"]
            rest, held = sizes.trained - experts.trained, experts.held_factors(ranks)
            rows.append([*row, _gb(3 * FLOAT * (rest + held))])
    head = ["model", "ranks", "base of a rank, GB", "buffers, GB", "rows out for a token", "slots elsewhere"]
    return _table([*head, "sent for a token, MB", "each slot alone, MB", "adapter and moments, GB"], rows)


def _sliced() -> str:
    rows = []
    for name in (*MODELS, ON_ATTENTION):
        plan = plan_of(name, 64, 64)
        whole = sum(plan.memory[part] for part in ("adapter", "moments", "gradients"))
        saved = [sliced_saving(sizes_of(name).trained, ranks) for ranks in (8, 64, 4096)]
        rows.append([name, _gb(whole), *(_gb(whole - one) for one in saved), _gb(plan.held)])
        rows[-1].append(_gb(plan.held - saved[1]))
    head = ["model", "today, any ranks", "sliced over 8", "over 64", "over 4,096"]
    return _table([*head, "all of a rank, 64 ranks, today", "with slices"], rows)


def _one_host() -> str:
    rows = []
    for name in MODELS:
        mapped, cut = plan_of(name, 8, 1), plan_of(name, 8, 8)
        base = mapped.memory["shard"]
        host = [base + 8 * (mapped.held - base), 8 * cut.held]
        rows.append([name, *map(_gb, (base, *host, 8 * sum(c.moved for c in cut.gathers)))])
    return _table(["model", "base", "host, mapped", "host, sharded over 8", "gathered a step, sharded"], rows)


def tables() -> dict[str, str]:
    """The tables of the page by name."""
    return {
        "models": _models(),
        "memory": _memory(),
        "time": _time(),
        "first limit": _first_limit(),
        "experts": _experts(),
        "spread": _spread(),
        "sliced": _sliced(),
        "one host": _one_host(),
    }


def filled(text: str) -> str:
    for name, table in tables().items():
        block = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
        text, found = block.subn(f"{table}\n", text)
        if found != 1:
            raise ValueError(f"{PAGE}: the table {name!r} is there {found} times, wanted once")
    return text


def main(arguments: list[str]) -> int:
    text = PAGE.read_text()
    new = filled(text)
    if "--check" not in arguments:
        PAGE.write_text(new)
    elif new != text:
        print("docs/explain/scale.md: a table is not what the formulas give; python tools/scale_page.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
