"""Pictures of benchmark lines."""

from __future__ import annotations

from typing import Any

from monograph.bench.rounds import geometric_mean

_COLOURS = {"monograph": "#0b6e4f", "bf16 (oneDNN)": "#888888", "bitsandbytes": "#c1440e"}


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
    "a": "4 layers of Llama-3.1-8B width\n2048 tokens in documents of about 350, checkpointing",
    "b": "8 layers of Qwen3-0.6B width\n4 documents of 512 tokens",
}


def plot_step(summary: dict[str, float], path: str) -> None:
    """Tokens a second and peak memory of every contender, fastest first, at the most threads measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in _CASES if any(key.startswith(f"{case}_") for key in summary)]
    figure, rows = plt.subplots(len(cases), 2, figsize=(11, 3.2 * len(cases)), squeeze=False)
    for case, axes in zip(cases, rows, strict=True):
        threads = max(int(key.split("_")[1]) for key in summary if key.startswith(f"{case}_"))
        prefix = f"{case}_{threads}_threads_"
        speeds = {
            key.removeprefix(prefix).removesuffix("_tokens_per_s"): value
            for key, value in summary.items()
            if key.startswith(prefix) and key.endswith("_tokens_per_s")
        }
        names = sorted(speeds, key=speeds.__getitem__)
        labels = ["Monograph" if name == "ours" else name.replace("_", " ") for name in names]
        colours = ["#0b6e4f" if name == "ours" else "#c1440e" for name in names]
        memory = [summary[f"{prefix}{name}_peak_MiB"] / 1024 for name in names]
        for axis, values, title in (
            (axes[0], [speeds[name] for name in names], "tokens/s"),
            (axes[1], memory, "peak memory, GiB"),
        ):
            axis.bar_label(axis.barh(labels, values, color=colours), fmt="%.3g", padding=3)
            axis.set_xlim(0, 1.15 * max(values))
            axis.set_title(title, fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel(_CASES[case] + f", {threads} threads", fontsize=7)
    figure.suptitle("A QLoRA step: Monograph and transformers + PEFT + bitsandbytes", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
