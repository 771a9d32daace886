"""What the model computes with and what the disk reads, over the time of one training step."""

from __future__ import annotations

from typing import Any


def last_step(events: list[list[Any]]) -> tuple[float, float]:
    """From the last use of the first unit but one to the last: a forward and a backward pass."""
    starts = [begin for kind, unit, begin, _, _ in events if kind == "use" and unit == 0]
    return (starts[-2], starts[-1]) if len(starts) > 1 else (0.0, events[-1][3])


def plot_overlap(events: list[list[Any]], path: str) -> None:
    """events: [kind, unit, begin, end, bytes], as BaseMemory.events has them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    begin, end = last_step(events)
    figure, axis = plt.subplots(figsize=(10, 4))
    uses = [(b - begin, unit) for kind, unit, b, _, _ in events if kind == "use" and begin <= b <= end]
    axis.step(*zip(*uses, strict=True), where="post", color="#222222", label="computes with")
    styles = {
        "read": ("#0b6e4f", 5, "reads"),
        "drop": ("#bbbbbb", 3, "lets go"),
        "wait": ("#c1440e", 5, "waits"),
    }
    for name, (colour, width, label) in styles.items():
        for kind, unit, b, e, _ in events:
            if kind != name or e < begin or b > end:
                continue
            axis.plot([b - begin, e - begin], [unit, unit], color=colour, linewidth=width, label=label)
            label = "_"
    axis.set(xlabel="seconds of a step", ylabel="layer; the head is the last")
    axis.legend(loc="upper right")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
