"""What a merge to few bits costs an adapter, measured: the tables of docs/explain/merge.md.

A small Llama learns six tasks on lists (copy, reverse, sort, sort down, rotate, swap pairs), each named by a
token. It is quantised; a LoRA of rank 16, trained on the quantised weights, gives every name the meaning of
the next one; its weight decay keeps |BA|/|W| small. On NF4 it is also kept where its strength passes one of
--strengths on the way; on each other format the adapter of NF4 is trained on for a while. Each adapter is
merged back into the format of its base with every rounding, and held-out lists are answered: loss and exact
match. Models are made in place.

    python tools/merge_quality.py --program build/release/cli/monograph --folder /tmp/merge-quality \\
        --seeds 0 1 2 --results bench/results/merge_quality.jsonl

--reuse merges what an earlier run trained. The largest model of docs/explain/merge.md, 110 million weights:

    python tools/merge_quality.py --program build/release/cli/monograph --folder /tmp/merge-quality-110m \\
        --width 1280 --inner 3072 --layers 6 --spread 0.02 --autocast --batch 64 --rate 3e-4 \\
        --decay 150 --formats nf4

--table prints the tables of a file of results: means over seeds, and in brackets the worst seed.

--random trains nothing: a random weight of 1024 x 1024 in each format, a random LoRA of rank 16, and what is
kept of it.
"""

import argparse
import json
import math
import pathlib
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import monograph as mg

SYMBOLS, LENGTH, TASKS = 16, 4, 6
SEPARATOR = SYMBOLS + TASKS
FORMATS = {"nf4": ["nf4"], "nf4-double": ["nf4", "--double-quant"], "nvfp4": ["nvfp4"], "mxfp4": ["mxfp4"]}
ROUNDINGS = ("nearest", "adapter", "calibrated")
CALIBRATION_LISTS = 256
LAST = "whole"  # the folder of an adapter that has learnt
Tool = Callable[..., str]


def answers(task: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    """The answer to each list, by the number of its task."""
    every = torch.stack(
        [
            lists,
            lists.flip(1),
            lists.sort(1).values,
            lists.sort(1, descending=True).values,
            lists.roll(-1, 1),
            lists.reshape(-1, LENGTH // 2, 2).flip(2).reshape(-1, LENGTH),
        ]
    )
    return every[task, torch.arange(len(lists))]


def batch(generator: torch.Generator, size: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `name list separator answer`, and labels that count the answer only; `shift` renames the tasks."""
    task = torch.randint(TASKS, (size,), generator=generator)
    lists = torch.randint(SYMBOLS, (size, LENGTH), generator=generator)
    answer = answers((task + shift) % TASKS, lists)
    rows = torch.cat([(SYMBOLS + task)[:, None], lists, torch.full((size, 1), SEPARATOR), answer], 1)
    labels = rows.clone()
    labels[:, : LENGTH + 2] = -100
    return rows, labels


def precision(options: argparse.Namespace) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if options.autocast else nullcontext()


def train(
    model: Any,
    rate: float,
    shift: int,
    seed: int,
    options: argparse.Namespace,
    done: Callable[[int], bool],
    decay: int,
    warm_up: int,
    weight_decay: float = 0.0,
) -> None:
    """At a constant rate, after a warm-up, until done(step); then it falls to nothing in `decay` steps."""
    generator = torch.Generator().manual_seed(1000 + seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, weight_decay=weight_decay, betas=(0.9, 0.98), fused=True
    )
    model.train()
    end: int | None = None
    step, began = 0, time.monotonic()
    while end is None or step < end:
        share = min(1.0, (step + 1) / warm_up)
        share *= 1.0 if end is None else max(0.02, (end - step) / decay)
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        rows, labels = batch(generator, options.batch, shift)
        with precision(options):
            loss = model(input_ids=rows, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"  step {step}: {loss.item():.4f}, {time.monotonic() - began:.0f} s", flush=True)
        step += 1
        if end is None and (done(step) or step == options.most_steps):
            end = step + decay
    print(f"  {step} steps", flush=True)


@torch.no_grad()
def measure(model: Any, shift: int, lists: int = 768) -> tuple[float, float]:
    """Loss and exact match on held-out lists. The argmax of every place given the right ones before it is
    the greedy answer wherever that answer is right."""
    model.eval()
    rows, labels = batch(torch.Generator().manual_seed(7), lists, shift)
    logits = torch.cat([model(input_ids=part).logits[:, LENGTH + 1 : -1].float() for part in rows.split(256)])
    wanted = labels[:, LENGTH + 2 :]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item()
    return loss, (logits.argmax(2) == wanted).all(1).float().mean().item()


def make_base(folder: pathlib.Path, seed: int, options: argparse.Namespace) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SEPARATOR + 1,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=max(4, options.width // 64),
        num_key_value_heads=max(4, options.width // 64),
        max_position_embeddings=32,
        initializer_range=options.spread or options.width**-0.5,
        tie_word_embeddings=False,
    )
    base: Any = LlamaForCausalLM(config)
    print(f"base of {sum(p.numel() for p in base.parameters()):,} weights, seed {seed}", flush=True)

    def learnt(step: int) -> bool:
        if step % 50:
            return False
        with precision(options):
            loss, match = measure(base, 0, 192)
        base.train()
        print(f"  after {step} steps: loss {loss:.4f}, exact match {match:.4f}", flush=True)
        return match >= options.until

    train(base, options.rate, 0, seed, options, learnt, options.decay, options.warm_up)
    base.to(torch.bfloat16).save_pretrained(folder)
    print(
        "  on its own tasks: loss {:.4f}, exact match {:.4f}".format(*measure(loaded(folder), 0)), flush=True
    )


def strength_of(model: Any) -> float:
    """|BA| / |W| over all adapted weights."""
    change = weight = 0.0
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            change += delta.square().sum().item()
            weight += layer.base_layer.weight.square().sum().item()
    return math.sqrt(change / weight)


def make_adapters(
    decoded: pathlib.Path, folder: pathlib.Path, begin: pathlib.Path, seed: int, options: argparse.Namespace
) -> None:
    """On the values that the quantised base decodes to, as QLoRA trains. One folder a strength; where `begin`
    exists, it is trained on to one more of its own."""
    torch.manual_seed(seed)
    config = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")
    base = loaded(decoded)
    goes_on = begin.exists() and begin.parent != folder
    model: Any = (
        PeftModel.from_pretrained(base, str(begin), is_trainable=True)
        if goes_on
        else get_peft_model(base, config)
    )
    print(f"adapter on {decoded.name}, seed {seed}", flush=True)
    left = [] if goes_on else sorted(options.strengths)

    def keep(name: str) -> None:
        out = folder / name
        model.save_pretrained(str(out))
        rows, _ = batch(torch.Generator().manual_seed(9), CALIBRATION_LISTS, 1)
        mg.calibrate(model, [{"input_ids": rows}], out)
        loss, match = measure(model, 1)
        found = strength_of(model)
        print(f"  at |BA|/|W| {found:.4f}: loss {loss:.4f}, exact match {match:.4f}", flush=True)

    @torch.no_grad()
    def passed(step: int) -> bool:
        if left and strength_of(model) >= left[0]:
            keep(f"{left.pop(0):.3f}")
            model.train()
        return goes_on or step >= options.adapter_steps

    decay = options.adapter_decay if not goes_on else options.adapter_decay // 2
    train(model, options.adapter_rate, 1, seed + 50, options, passed, decay, 20, options.weight_decay)
    keep(LAST)


def loaded(folder: pathlib.Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def compare(folder: pathlib.Path, seed: int, name: str, tool: Tool) -> list[dict[str, Any]]:
    """One line a strength and rounding."""
    packed = folder / name
    before, _ = measure(loaded(folder / f"{name}-decoded"), 1)
    lines = []
    for adapter in sorted((folder / f"{name}-adapters").iterdir(), reverse=True):
        model = PeftModel.from_pretrained(loaded(folder / f"{name}-decoded"), str(adapter))
        size = strength_of(model)
        loss, match = measure(model, 1)
        for rounding in ROUNDINGS:
            merge = ["merge", packed, "--adapter", adapter, "--base", "dequantized", "--to", *FORMATS[name]]
            more = ["--rounding", rounding, "--out", folder / "merged", "--force", "--json"]
            whole = json.loads(tool(*merge, *more))["whole"]
            tool("dequantize", folder / "merged", folder / "decoded", "--to", "fp32", "--force")
            merged_loss, merged_match = measure(loaded(folder / "decoded"), 1)
            lines.append(
                {
                    "bench": "merge_quality",
                    "weights": sum(p.numel() for n, p in model.named_parameters() if "lora" not in n),
                    "seed": seed,
                    "format": name,
                    "strength": round(size, 5),
                    "rounding": rounding,
                    "loss_before": round(before, 5),
                    "loss_unmerged": round(loss, 5),
                    "match_unmerged": round(match, 5),
                    "loss": round(merged_loss, 5),
                    "match": round(merged_match, 5),
                    "gain_kept": round((before - merged_loss) / (before - loss), 5),
                    "kept": round(whole["kept"], 5),
                    "error_along_adapter": round(whole["error_along_adapter"], 5),
                    "cosine": round(whole["cosine"], 5),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    return lines


def table(results: pathlib.Path) -> None:
    """Loss and exact match, then shares of the gain, by format and strength."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:  # seeds differ a little in strength
        apart = {
            abs(math.log(strength / line["strength"])): strength for strength in (0.009, 0.018, 0.037, 0.075)
        }
        near = apart[min(apart)]
        groups.setdefault((line["weights"], line["format"], -near, line["rounding"]), []).append(line)
    print("| weights, format | change | | loss | exact match % | gain kept % | kept along V | error |")
    print("|---|---|---|---|---|---|---|---|")

    def row(what: str, rounding: str, loss: list[float], match: list[float], *more: str) -> None:
        cells = [f"{sum(loss) / len(loss):.4f} ({max(loss):.4f})"]
        cells.append(f"{100 * sum(match) / len(match):.1f} ({100 * min(match):.1f})")
        print(f"| {what} | {rounding} | {' | '.join([*cells, *(more or ('', '', ''))])} |")

    for weights, format, near, rounding in sorted(
        groups, key=lambda key: (*key[:3], ROUNDINGS.index(key[3]))
    ):
        own = groups[weights, format, near, rounding]
        mean = {
            key: sum(line[key] for line in own) / len(own)
            for key in ("strength", "kept", "error_along_adapter")
        }
        what = f"{weights / 1e6:.1f} M, {format} | {mean['strength']:.1%}"
        if rounding == "nearest":
            row(
                what,
                "unmerged",
                [line["loss_unmerged"] for line in own],
                [line["match_unmerged"] for line in own],
            )
        gains = [line["gain_kept"] for line in own]
        more = f"{100 * sum(gains) / len(gains):.1f} ({100 * min(gains):.1f})"
        sides = (f"{mean['kept']:.3f}", f"{mean['error_along_adapter']:.3f}")
        row(what, rounding, [line["loss"] for line in own], [line["match"] for line in own], more, *sides)


def random_table(folder: pathlib.Path, strengths: list[float], tool: Tool) -> None:
    """What is kept, and the error along the adapter, of a random LoRA on a random weight."""
    torch.manual_seed(0)
    size, rank, module = 1024, 16, "model.layers.0.mlp.up_proj"
    for name in ("base", "adapter"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    weight = (torch.randn(size, size) * 0.02).bfloat16()
    save_file({f"{module}.weight": weight}, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    factors = {"A": torch.randn(rank, size), "B": torch.randn(size, rank) * 0.02 / math.sqrt(rank)}
    save_file(
        {f"base_model.model.{module}.lora_{key}.weight": value for key, value in factors.items()},
        folder / "adapter" / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["up_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    print("| change | rounding | " + " | ".join(FORMATS) + " |\n|---|---|" + "---|" * len(FORMATS))
    for name, to in FORMATS.items():
        tool("quantize", folder / "base", folder / name, "--to", *to, "--force")
    for strength in strengths:
        for rounding in ROUNDINGS[:2]:
            cells = []
            for name, to in FORMATS.items():
                text = tool(
                    "merge", folder / name, "--adapter", f"{folder / 'adapter'}:{strength}",
                    "--base", "dequantized", "--to", *to, "--rounding", rounding,
                    "--out", folder / "merged", "--force", "--json",
                )  # fmt: skip
                whole = json.loads(text)["whole"]
                cells.append(f"{whole['kept']:.3f}, {whole['error_along_adapter']:.3f}")
            print(f"| {strength:.1%} | {rounding} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="monograph")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("merge-quality"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.009, 0.018, 0.037])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--spread", type=float, help="of first weights; 1 / sqrt(width)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--warm-up", type=int, default=50, help="steps, of the base")
    parser.add_argument("--until", type=float, default=0.8, help="exact match from which the rate falls")
    parser.add_argument("--decay", type=int, default=300, help="steps in which it falls")
    parser.add_argument("--most-steps", type=int, default=3000)
    parser.add_argument("--adapter-rate", type=float, default=3e-3)
    parser.add_argument("--adapter-steps", type=int, default=800, help="before its rate falls")
    parser.add_argument("--adapter-decay", type=int, default=300, help="steps in which it falls")
    parser.add_argument("--weight-decay", type=float, default=6.0, help="of the adapter")
    parser.add_argument("--autocast", action="store_true", help="train in bf16")
    parser.add_argument("--random", action="store_true", help="train nothing, print what is kept")
    parser.add_argument("--reuse", action="store_true", help="merge what an earlier run trained")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, help="append the lines to this file")
    parser.add_argument("--table", action="store_true", help="print the tables of --results")
    options = parser.parse_args()
    if options.table:
        return table(options.results)

    def tool(*arguments: object) -> str:
        command = [options.program, *map(str, arguments)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    if options.random:
        return random_table(options.folder / "random", [*options.strengths, 0.077], tool)
    for seed in options.seeds:
        folder = options.folder / f"seed-{seed}"
        if not (options.reuse and (folder / "base").exists()):
            make_base(folder / "base", seed, options)
        for name in options.formats:
            packed, decoded, adapters = (folder / f"{name}{part}" for part in ("", "-decoded", "-adapters"))
            if not (options.reuse and adapters.exists()):
                tool("quantize", folder / "base", packed, "--to", *FORMATS[name], "--force")
                tool("dequantize", packed, decoded, "--to", "fp32", "--force")
                begin = folder / "nf4-adapters" / LAST
                make_adapters(decoded, adapters, begin, seed, options)
            if options.train_only:
                continue
            lines = compare(folder, seed, name, tool)
            if options.results:
                with options.results.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
