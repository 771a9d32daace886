"""Pictures of benchmark lines."""

from __future__ import annotations

from typing import Any

from monograph.bench.rounds import geometric_mean

# In every figure, also those of tools/site/draw_figures.py: ours, and what it is compared with.
OURS, PEER, OTHER_PEER = "#0b6e4f", "#c1440e", "#e8a07c"
_COLOURS = {"monograph": OURS, "bf16 (oneDNN)": OTHER_PEER, "bitsandbytes": PEER}


def _speeds(lines: list[dict[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Geometric mean over the shapes of GFLOP/s, by number of tokens."""
    speeds: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        case = line["case"]
        if case["pass"] != name or case["threads"] != 1 or case["malloc"] != "default":
            continue
        work = 2 * case["m"] * case["n"] * case["k"] / 1e6
        times = {"monograph": line["ours_ms"], "bf16 (oneDNN)": line["peers"]["bf16"]}
        times["bitsandbytes"] = line["peers"]["bitsandbytes"]
        for label, ms in times.items():
            speeds.setdefault(label, {}).setdefault(case["m"], []).append(work / ms)
    return {label: sorted((m, geometric_mean(v)) for m, v in by_m.items()) for label, by_m in speeds.items()}


def plot_linear(lines: list[dict[str, Any]], path: str) -> None:
    """Speed against tokens, forward and dX, at one thread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, (name, title) in zip(axes, (("forward", "forward"), ("dx", "input gradient")), strict=True):
        for label, points in _speeds(lines, name).items():
            axis.plot(*zip(*points, strict=True), marker="o", label=label, color=_COLOURS[label])
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"NF4 linear, {title}, 1 thread")
        axis.set_xticks([1, 4, 16, 64, 128, 512, 2048], ["1", "4", "16", "64", "128", "512", "2048"])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GFLOP/s, geometric mean over 7 shapes")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


_CASES = {
    "a": "4 layers of Llama-3.1-8B width\n2048 tokens, documents of about 350\ncheckpointing",
    "b": "8 layers of Qwen3-0.6B width\n4 documents of 512 tokens",
}


def plot_step(lines: list[dict[str, Any]], summary: dict[str, float], path: str) -> None:
    """The time of every contender over ours, in paired steps, and its peak memory; one row a case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [line for line in lines if line["case"]["case"] in _CASES]
    figure, rows = plt.subplots(len(lines), 2, figsize=(11, 3 * len(lines)), squeeze=False)
    for line, axes in zip(lines, rows, strict=True):
        case, threads = line["case"]["case"], line["case"]["threads"]
        times = {"ours": 1.0} | line["ratio"]
        names = sorted(times, key=times.__getitem__, reverse=True)
        labels = ["Monograph" if name == "ours" else name.replace("_", " ") for name in names]
        colours = [OURS if name == "ours" else PEER for name in names]
        memory = [summary[f"{case}_{threads}_threads_{name}_peak_MiB"] / 1024 for name in names]
        for axis, values, title in (
            (axes[0], [times[name] for name in names], "time of a step, Monograph = 1"),
            (axes[1], memory, "peak memory of the process tree, GiB"),
        ):
            axis.bar_label(axis.barh(labels, values, color=colours), fmt="%.3g", padding=3)
            axis.set_xlim(0, 1.15 * max(values))
            axis.set_title(title, fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel(f"{_CASES[case]}, {threads} threads", fontsize=7)
    figure.suptitle("A QLoRA step: Monograph against transformers + PEFT + bitsandbytes", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
