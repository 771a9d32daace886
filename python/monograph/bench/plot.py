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
