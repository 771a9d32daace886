"""`python -m monograph estimate MODEL`: the bytes that training takes, before anything is loaded.

MODEL is a folder with a config.json of transformers, or that file; weights need not be there. Or it is a GGUF
file. Base, adapter, moments and gradients are counted to the byte by the rules that loading and training
follow. Activations are the peak of a step with checkpointing whose tensors have no memory.

    python -m monograph estimate Llama-3.1-8B --format nf4 --rank 16 --tokens 4096
    python -m monograph estimate config.json --format mxfp4 --tokens 8192 --no-checkpointing --json
    python -m monograph estimate Llama-3.1-8B --native

--native counts a step of `monograph finetune` by its own rule, which is that of `finetune --dry-run`.
Not counted: Python, torch and its compilers (0.5 GB or so), and scratch inside kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from monograph.cli.command_parser import CommandParser, say_next


def run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.tokens < 1 or options.rank < 1:
        wanted = "--tokens" if options.tokens < 1 else "--rank"
        found = options.tokens if options.tokens < 1 else options.rank
        print(f"monograph estimate: {wanted} is {found}, wanted 1 or more", file=sys.stderr)
        return 2
    try:
        found = _found(options)
    except (OSError, ValueError) as error:
        print(f"monograph estimate: {error}", file=sys.stderr)
        return 2
    total = sum(found.values())
    if options.json:
        print(json.dumps({"schema_version": 1, "bytes": found, "total_bytes": total}))
    else:
        for name, size in [*found.items(), ("together", total)]:
            print(f"{name:14}{size / 1e9:>10.3f} GB")
    if options.native:
        say_next(options, "monograph", "finetune", "RECIPE.yml", "--tokens", "FILE", "--dry-run")
    else:
        say_next(options, "python", "-m", "monograph", "train", "RECIPE.yml", "--base_model", options.model)
    return 0


def _found(options: argparse.Namespace) -> dict[str, int]:
    step: dict[str, Any] = {
        "format_name": options.format,
        "double_quant": not options.no_double_quant,
        "rank": options.rank,
        "tokens": options.tokens,
        "checkpointing": not options.no_checkpointing,
    }
    less = {
        "tiled_mlp": options.tiled_mlp or options.tiled_mlp_num_shards is not None,
        "mlp_slices": options.tiled_mlp_num_shards,
        "offload": options.offload,
    }
    if not options.native:
        return estimate(options.model, expert_ranks=options.expert_parallel_size, **step, **less)
    if asked := [name for name, value in less.items() if value]:
        raise ValueError(f"{asked[0]} beside --native, wanted none: the native trainer has no such option")
    if options.expert_parallel_size != 1:
        raise ValueError(
            f"--expert-parallel-size is {options.expert_parallel_size} beside --native, wanted 1: the native "
            "trainer is one process"
        )
    from monograph.cli.native_bytes import native_bytes

    return native_bytes(options.model, **step)


def _parser() -> CommandParser:
    parser = CommandParser("estimate", __doc__)
    add = parser.add_argument
    add("model", help="a folder with a config.json of transformers, that file, or a GGUF file")
    add(
        "--format",
        default=None,
        help="of the base: nf4 (default), fp4, mxfp4, mxfp8, nvfp4, fp8-block, int4, int8, fp8, none",
    )
    add("--no-double-quant", action="store_true", help="float32 scales for nf4 and fp4")
    add("--rank", type=int, default=16, help="of LoRA on all linear layers; default 16")
    add("--tokens", type=int, default=4096, help="of a micro-batch; default 4096")
    add("--expert-parallel-size", type=int, default=1, help="ranks over which experts are spread; default 1")
    add("--no-checkpointing", action="store_true", help="keep all activations of the forward")
    add("--tiled-mlp", action="store_true", help="MLPs in slices of 1,024 tokens")
    add("--tiled-mlp-num-shards", type=int, default=None, help="in so many slices")
    add("--offload", action="store_true", help="what a forward keeps waits in a file")
    add("--native", action="store_true", help="of `monograph finetune`, the trainer without Python")
    return parser


def estimate(
    model: str,
    *,
    format_name: str | None,
    double_quant: bool,
    rank: int,
    tokens: int,
    checkpointing: bool,
    expert_ranks: int = 1,
    tiled_mlp: bool = False,
    mlp_slices: int | None = None,
    offload: bool = False,
) -> dict[str, int]:
    """Bytes by what they are for: one process, one micro-batch of it a step."""
    from peft import LoraConfig

    from monograph.distributed.model_sizes import read_sizes
    from monograph.distributed.plan import Mesh, Step, make_plan
    from monograph.hf.optimize import add_lora
    from monograph.hf.transformers.activation_checkpointing import enable_checkpointing
    from monograph.hf.transformers.gguf_folder import share_table
    from monograph.hf.transformers.planned_model import planned_model
    from monograph.training.fake_step import activation_bytes
    from monograph.training.token_slices import slice_mlps

    # Memory that nobody writes to costs nothing.
    base = planned_model(model, format_name, double_quant).to_empty(device="cpu")
    base.tie_weights()  # to_empty gives a tied head memory of its own
    share_table(base)
    if checkpointing:
        enable_checkpointing(base, {"use_reentrant": False})
    tuned = add_lora(base, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    tuned.train()
    if tiled_mlp:
        slice_mlps(tuned, mlp_slices)
    sizes = read_sizes(tuned)
    plan = make_plan(sizes, Mesh(expert_ranks, 1, expert_ranks), Step(tokens, expert_ranks))
    spread = {name: plan.memory[name] for name in ("experts", "exchange") if name in plan.memory}
    return {
        "base": sizes.base_bytes - (sizes.experts.nbytes if spread and sizes.experts is not None else 0),
        **spread,
        "adapter": plan.memory["adapter"],
        "moments": plan.memory["moments"],
        "gradients": plan.memory["gradients"],
        "activations": activation_bytes(tuned, tokens, offload=offload),
    }
