"""Draws the recorded figures of bench/results as pictures, and writes the page that shows them.

    python tools/site/draw_figures.py FOLDER        # figures.md and one SVG a figure

Nothing is measured here: every number is a line of a file that is named below its picture.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
# One code everywhere, also in monograph/bench/plot.py: Monograph is green, in several shades where several of
# its settings are compared, and what it is compared with is orange.
OURS = ["#0b6e4f", "#45a37f", "#8fcbb1", "#063d2c", "#c3e3d6"]
PEER = "#c1440e"
PEERS = {"bitsandbytes", "the same model in 16 bits", "nearest"}
TOKENS = [1, 16, 128, 2048]

Lines = list[dict[str, Any]]
Series = dict[str, list[float]]


def lines_of(name: str) -> Lines:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def summary_of(name: str) -> dict[str, float]:
    return next(line["summary"] for line in lines_of(name) if "summary" in line)


def geometric_mean(numbers: Iterable[float]) -> float:
    logs = [math.log(number) for number in numbers]
    return math.exp(sum(logs) / len(logs))


def linear_ratios() -> Series:
    """By format: time of bf16 over ours for each of TOKENS. Forward, one thread, mean over the shapes."""
    ratios: Series = {}
    for file in ("linear", "linear-mxfp4", "linear-nvfp4", "linear-mxfp8", "linear-fp8-block"):
        cases = [line for line in lines_of(file) if "case" in line]
        wanted = {"pass": "forward", "threads": 1, "malloc": "default"}
        cases = [c for c in cases if all(c["case"][key] == value for key, value in wanted.items())]
        by_tokens = [[c["ratio"]["bf16"] for c in cases if c["case"]["m"] == m] for m in TOKENS]
        ratios[cases[0]["case"]["format"]] = [geometric_mean(numbers) for numbers in by_tokens]
    return ratios


def trl_seconds() -> Series:
    summary = summary_of("trl")
    key = "{}_eager_2_threads{}_seconds"
    trainers = ("sft", "dpo", "grpo")
    return {
        "monograph": [summary[key.format(name, "")] for name in trainers],
        "bitsandbytes": [summary[key.format(name, "_bitsandbytes")] for name in trainers],
    }


def attention_ratios() -> Series:
    cases = [c for c in lines_of("attention") if "case" in c]
    shown = [("8x512", "sdpa_dense"), ("8x512", "sdpa_loop"), ("1x4096", "sdpa_causal")]
    shown.append(("decode 1 of 8192", "sdpa_causal"))
    ratios: Series = {}
    for heads in (16, 4):
        by_length = {c["case"]["lengths"]: c["ratio"] for c in cases if c["case"]["kv_heads"] == heads}
        ratios[f"{heads} heads of keys"] = [by_length[length][peer] for length, peer in shown]
    return ratios


def memory_of_formats() -> Series:
    summary = summary_of("format_memory")
    formats = ("mxfp4", "nvfp4", "mxfp8", "fp8-block")
    return {
        "packed": [summary[f"{name}_packed_resident_MiB"] for name in formats],
        "the same model in 16 bits": [summary[f"{name}_16_bit_resident_MiB"] for name in formats],
    }


def kept_by_rounding() -> Series:
    """Share of what training gained that is left after merging to 4 bits, mean over seeds and strengths."""
    lines = [line for line in lines_of("merge_quality") if "gain_kept" in line]
    formats = ("nf4", "nf4-double", "mxfp4", "nvfp4")
    kept: Series = {}
    for rounding in ("nearest", "adapter", "calibrated"):
        rows = [
            [line["gain_kept"] for line in lines if (line["format"], line["rounding"]) == (name, rounding)]
            for name in formats
        ]
        kept[rounding] = [sum(row) / len(row) for row in rows]
    return kept


def bars(path: pathlib.Path, groups: list[str], series: Series, label: str, digits: int) -> None:
    """Bars side by side with their number above."""
    figure, axis = plt.subplots(figsize=(8, 3.6))
    width = 0.8 / len(series)
    shades = iter(OURS)
    for index, (name, numbers) in enumerate(series.items()):
        at = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axis.bar(at, numbers, width * 0.92, label=name, color=PEER if name in PEERS else next(shades))
        axis.bar_label(drawn, [f"{number:.{digits}f}" for number in numbers], fontsize=8, padding=2)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_ylabel(label)
    axis.margins(y=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=len(series), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def alternative(title: str, groups: list[str], series: Series, label: str, digits: int) -> str:
    """The picture in words, for those who do not see it: every number."""
    rows = []
    for name, numbers in series.items():
        each = ", ".join(
            f"{group} {number:.{digits}f}" for group, number in zip(groups, numbers, strict=True)
        )
        rows.append(f"{name}: {each}")
    return " ".join(f"{title}, {label}. {'; '.join(rows)}".split())


# (name, title, groups, series, what is drawn, digits, what to know)
FIGURES: list[tuple[str, str, list[str], Callable[[], Series], str, int, str]] = [
    (
        "trl",
        "A step of TRL's trainers",
        ["SFT", "DPO", "GRPO"],
        trl_seconds,
        "seconds a step, 2 threads",
        1,
        "TRL's own loops over Monograph's base and over that of bitsandbytes (`trl.jsonl`). Lower is better.",
    ),
    (
        "linear",
        "One linear layer, by format",
        ["1 token", *(f"{tokens} tokens" for tokens in TOKENS[1:])],
        linear_ratios,
        "time of bf16 (oneDNN) / ours",
        1,
        "Forward on one thread, geometric mean over the shapes of `linear.jsonl` and `linear-FORMAT.jsonl`. "
        "The peer holds the weight in 16 bits. Above 1 Monograph is the faster one.",
    ),
    (
        "attention",
        "Attention over documents",
        ["8 of 512:\ndense mask", "8 of 512:\na call each", "1 of 4096:\ncausal", "1 token of 8192:\ncausal"],
        attention_ratios,
        "time of the peer / ours",
        1,
        "bf16, 16 heads of 128, one thread (`attention.jsonl`); the peer is `scaled_dot_product_attention` "
        "as named below the bars. Above 1 Monograph is the faster one.",
    ),
    (
        "memory",
        "Memory of a step, by format",
        ["mxfp4", "nvfp4", "mxfp8", "fp8-block"],
        memory_of_formats,
        "MiB resident, peak",
        0,
        "Peak resident memory of three steps, with the pages of mapped files (`format_memory.jsonl`).",
    ),
    (
        "merge",
        "What is left of training after a merge to 4 bits",
        ["nf4", "nf4 double", "mxfp4", "nvfp4"],
        kept_by_rounding,
        "share of the gain that is kept",
        2,
        "Mean over the models, seeds and strengths of `merge_quality.jsonl`, by the rounding of "
        "`monograph merge --rounding`. [How it works](merge.md).",
    ),
]

HEAD = """\
# Figures

Drawn from the recorded lines in `bench/results` by `tools/site/draw_figures.py`. All were measured on two
cores of a Xeon with AMX; the [machine and the commands](../bench/results/2026-11-15-xeon-amx.md) and
[how they are taken](performance.md) have pages of their own.
"""


def draw_all(folder: pathlib.Path) -> None:
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "monograph"  # the same bytes in every run
    page = [HEAD]
    for name, title, groups, series, label, digits, text in FIGURES:
        shown = series()
        bars(pictures / f"{name}.svg", groups, shown, label, digits)
        words = alternative(title, groups, shown, label, digits)
        page.append(f"## {title}\n\n![{words}](figures/{name}.svg)\n\n{text}\n")
    (folder / "figures.md").write_text("\n".join(page))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    draw_all(parser.parse_args().folder)


if __name__ == "__main__":
    main()
