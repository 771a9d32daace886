"""Pictures of packed rows, and how much of them is used."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

import torch

from monograph.packing.packed_rows import PackedRows, Piece, pack

# Neighbours differ, also in grey.
_COLOURS = ("#0b6e4f", "#f2a541", "#3d5a80", "#c1440e", "#8fb996", "#6d597a")
_PADDING = "#eeeeee"


@dataclass(frozen=True)
class Efficiency:
    """The share of the tokens a model computes that belong to documents, by how batches are formed."""

    packed: float  # the rows given
    first_fit: float  # documents in their order into rows of the same capacity
    padded: float  # batches of `batch_size` documents in their order, padded to the longest of each
    batch_size: int

    def __str__(self) -> str:
        lines = [f"packed      {self.packed:8.2%} of the tokens computed belong to documents"]
        for name, share in (("first fit", self.first_fit), ("padding", self.padded)):
            ratio = self.packed / share if share else float("inf")
            lines.append(
                f"{name:11} {share:8.2%}   packed does {ratio:.3f} times the documents in the same tokens"
            )
        return "\n".join(
            [*lines, f"(padding: batches of {self.batch_size} in order, each to its longest document)"]
        )


def measure_efficiency(rows: PackedRows, batch_size: int = 8) -> Efficiency:
    """What share of the work is useful in these rows, in rows by first fit, and in padded batches.

    Documents longer than a row are truncated in the padded batches, and in first fit unless `rows` split
    them.
    """
    overlong = "split" if rows.starts.numel() else "truncate"
    by_first_fit = pack(rows.lengths, rows.capacity, strategy="first_fit", overlong=overlong)
    return Efficiency(rows.efficiency, by_first_fit.efficiency, _padded(rows, batch_size), batch_size)


def _padded(rows: PackedRows, batch_size: int) -> float:
    lengths = rows.lengths[rows.lengths > 0].clamp(max=rows.capacity)
    if not lengths.numel():
        return 1.0
    missing = -lengths.numel() % batch_size
    batches = torch.nn.functional.pad(lengths, (0, missing)).reshape(-1, batch_size)
    sizes = torch.full((len(batches),), batch_size)
    sizes[-1] -= missing
    return int(lengths.sum()) / int((batches.amax(dim=1) * sizes).sum())


def _shown(rows: PackedRows, most: int) -> list[int]:
    """Numbers of at most `most` rows, evenly spread."""
    if len(rows) <= most:
        return list(range(len(rows)))
    return [i * (len(rows) - 1) // max(most - 1, 1) for i in range(most)]


def _cells(row: list[Piece], capacity: int, width: int) -> str:
    """A letter for each document; each cell shows what its middle token belongs to."""
    ends, total = [], 0
    for piece in row:
        total += piece.length
        ends.append(total)
    cells = []
    for cell in range(width):
        token = (2 * cell + 1) * capacity // (2 * width)
        document = sum(end <= token for end in ends)
        cells.append("." if document == len(row) else ascii_lowercase[document % 26])
    return "".join(cells)


def text_picture(rows: PackedRows, *, width: int = 72, most: int = 24) -> str:
    """Rows as lines of text: letters are documents, dots are padding. At most `most` rows, evenly spread."""
    digits = len(str(max(len(rows) - 1, 0)))
    lines = []
    for number in _shown(rows, most):
        row = rows[number]
        used = sum(piece.length for piece in row) / rows.capacity
        line = f"{number:{digits}} |{_cells(row, rows.capacity, width)}| {len(row):4} documents {used:7.2%}"
        lines.append(line)
    if len(rows) > most:
        lines.append(f"({len(lines)} of {len(rows)} rows)")
    return "\n".join(lines)


def draw_rows(rows: PackedRows, path: str, *, most: int = 48, title: str | None = None) -> None:
    """Draws the token grid to a file: a bar for each row, a block for each document, grey for padding.

    Needs matplotlib; the ending of `path` says the kind of file (png, svg, pdf).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = _shown(rows, most)
    figure, axis = plt.subplots(figsize=(10, 1.2 + 0.16 * max(len(shown), 4)))
    for height, number in enumerate(shown):
        axis.broken_barh([(0, rows.capacity)], (height - 0.42, 0.84), facecolors=_PADDING)
        start = 0
        bars = []
        for piece in rows[number]:
            bars.append((start, piece.length))
            start += piece.length
        colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(bars))]
        axis.broken_barh(bars, (height - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidth=0.3)
    axis.set(xlim=(0, rows.capacity), ylim=(len(shown) - 0.4, -0.6), xlabel="token of the row", ylabel="row")
    ticks = range(0, len(shown), max(1, len(shown) // 12))
    axis.set_yticks(list(ticks), [str(shown[i]) for i in ticks])
    part = f"{len(shown)} of {len(rows)} rows" if len(shown) < len(rows) else f"{len(rows)} rows"
    axis.set_title(title or f"{part} of {rows.capacity} tokens, {rows.efficiency:.2%} used")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
