"""PackedSampler: which documents a rank sees at a step, as a function of (seed, epoch, step) alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from monograph.packing.packed_rows import Lengths, PackedRows, Piece, check_lengths, pack

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64 words, whose products wrap; shifts made logical by a mask."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1]), (31, 1)):
        words = (words ^ ((words >> shift) & (_WORD >> shift))) * _signed(factor)
    return words


def _shuffled(count: int, *key: int) -> torch.Tensor:
    """A permutation of `count` numbers that depends on the key alone: not on the version of torch, the
    platform or the threads, as `torch.randperm` may."""
    stream = torch.zeros(1, dtype=torch.int64)
    for part in key:
        stream = _mixed(stream + _signed((part + 1) * _GOLDEN & _WORD))
    return _mixed(torch.arange(count) * _signed(_GOLDEN) + stream).argsort(stable=True)


class _Epoch:
    """The rows of one epoch, packed chunk by chunk; one chunk is kept."""

    def __init__(self, sampler: PackedSampler, number: int) -> None:
        self.number = number
        self._sampler = sampler
        documents = sampler.lengths.numel()
        self._order = (
            _shuffled(documents, sampler.seed, number) if sampler.shuffle else torch.arange(documents)
        )
        self._chunks = self._order.split(sampler.chunk) if documents else ()
        self._rows_before = [0]  # in the chunks counted so far
        self._kept: tuple[int, PackedRows, list[int]] | None = None

    def _chunk(self, index: int) -> tuple[PackedRows, list[int]]:
        """The packed rows of a chunk, and the order in which they come."""
        if self._kept is None or self._kept[0] != index:
            sampler = self._sampler
            rows = pack(sampler.lengths[self._chunks[index]], sampler.capacity, **sampler.pack_options)
            # Best fit lists the longest documents first: without a shuffle of its rows an epoch would too.
            order = _shuffled(len(rows), sampler.seed, self.number, index) if sampler.shuffle else None
            self._kept = index, rows, list(range(len(rows))) if order is None else order.tolist()
        return self._kept[1:]

    def _count_until(self, row: int | None) -> None:
        """Counts chunks until `row` is among them, or all of them."""
        while len(self._rows_before) <= len(self._chunks) and (row is None or self._rows_before[-1] <= row):
            rows, _ = self._chunk(len(self._rows_before) - 1)
            self._rows_before.append(self._rows_before[-1] + len(rows))

    def __len__(self) -> int:
        self._count_until(None)
        return self._rows_before[-1]

    def row(self, number: int) -> list[Piece] | None:
        """Row `number` of the epoch; None behind the last."""
        self._count_until(number)
        if number >= self._rows_before[-1]:
            return None
        index = next(i for i in range(len(self._rows_before) - 1) if number < self._rows_before[i + 1])
        rows, order = self._chunk(index)
        documents = self._chunks[index]
        pieces = rows[order[number - self._rows_before[index]]]
        return [piece._replace(document=int(documents[piece.document])) for piece in pieces]


class PackedSampler(Sampler[list[Piece]]):
    """A batch sampler of packed rows, for `DataLoader(PackedDataset(dataset), batch_sampler=...)`.

        sampler = PackedSampler(lengths, 4096, rows_per_step=16, seed=1)
        sampler.resume(epoch=2, step=130)        # continues there, on any number of ranks

    An epoch is a sequence of rows, the same whatever the number of ranks: the documents are shuffled by
    (seed, epoch), cut into chunks, each chunk packed, its rows shuffled. Step s is rows `s * rows_per_step`
    to `(s + 1) * rows_per_step`, the global batch of one optimiser step. It is dealt out in batches of
    `rows_per_batch` rows: batch i goes to rank `i % world_size`. So every rank has the same number of
    batches in a step, `batches_per_step` (its gradient accumulation). Where the rows do not come out even,
    and at the end of an epoch, some batches are short or empty; the collator makes a batch of padding from
    an empty one, which has no targets and so does not change a loss that is divided by the global number of
    targets.

    lengths: tokens of each document, the same on all ranks.
    capacity, strategy, overlong, max_documents: as in `pack`.
    rows_per_step: rows of a global batch. rows_per_batch: rows of one forward pass, flattened into one row.
    rank, world_size: by default those of `torch.distributed`, or one rank if it is not initialised.
    shuffle: False keeps the documents in their order; with strategy="first_fit" the rows nearly keep it too.
    chunk: documents packed at a time. Larger wastes less, by the last rows of a chunk.
    drop_last: leaves a short last step out.

    Nothing here changes while it is iterated. With accelerate's or the HF Trainer's own sharding of batches
    give `rank=0, world_size=1`: they deal batches out in the same manner.
    """

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,
        *,
        rows_per_step: int = 1,
        rows_per_batch: int = 1,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        strategy: str = "best_fit_decreasing",
        overlong: str = "refuse",
        max_documents: int | None = None,
        shuffle: bool = True,
        chunk: int = 1 << 18,
        drop_last: bool = False,
    ) -> None:
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = rank if rank is not None else torch.distributed.get_rank() if together else 0
        self.world_size = (
            world_size if world_size is not None else torch.distributed.get_world_size() if together else 1
        )
        for name, value in (
            ("rows_per_step", rows_per_step),
            ("rows_per_batch", rows_per_batch),
            ("chunk", chunk),
            ("world_size", self.world_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, wanted 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, wanted 0 to {self.world_size - 1}")
        self.pack_options: dict[str, Any] = {
            "strategy": strategy,
            "overlong": overlong,
            "max_documents": max_documents,
        }
        pack([], capacity, **self.pack_options)  # checks the options
        self.lengths = check_lengths(lengths, capacity, overlong)
        self.capacity, self.seed, self.shuffle, self.chunk = capacity, seed, shuffle, chunk
        self.rows_per_step, self.rows_per_batch, self.drop_last = rows_per_step, rows_per_batch, drop_last
        self.epoch, self.step = 0, 0
        self._packed: _Epoch | None = None

    @property
    def batches_per_step(self) -> int:
        """Batches that each rank has in a step."""
        return -(-self.rows_per_step // (self.rows_per_batch * self.world_size))

    def _epoch(self, number: int) -> _Epoch:
        if self._packed is None or self._packed.number != number:
            self._packed = _Epoch(self, number)
        return self._packed

    def steps(self, epoch: int) -> int:
        """Steps of an epoch. Packs all of it: 10 million documents in seconds."""
        rows = len(self._epoch(epoch))
        return rows // self.rows_per_step if self.drop_last else -(-rows // self.rows_per_step)

    def rows(self, epoch: int, step: int) -> list[list[Piece]]:
        """The global batch of a step: the same on every rank and for every world size."""
        if epoch < 0 or step < 0:
            raise ValueError(f"epoch is {epoch} and step {step}, wanted 0 or more")
        first = step * self.rows_per_step
        packed = self._epoch(epoch)
        rows = [packed.row(number) for number in range(first, first + self.rows_per_step)]
        return [row for row in rows if row is not None]

    def batches(self, epoch: int, step: int) -> list[list[Piece]]:
        """What this rank gets of a step: `batches_per_step` lists of pieces, some of them perhaps empty."""
        rows = self.rows(epoch, step)
        firsts = [
            (i * self.world_size + self.rank) * self.rows_per_batch for i in range(self.batches_per_step)
        ]
        return [
            [piece for row in rows[first : first + self.rows_per_batch] for piece in row] for first in firsts
        ]

    def resume(self, epoch: int, step: int) -> None:
        """The next iteration begins with this step of this epoch."""
        self.epoch, self.step = epoch, step

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begins with this epoch; the step set by `resume` for the same epoch stays."""
        if epoch != self.epoch:
            self.resume(epoch, 0)

    def __iter__(self) -> Iterator[list[Piece]]:
        epoch, step = self.epoch, self.step
        while rows := self.rows(epoch, step):
            if self.drop_last and len(rows) < self.rows_per_step:
                return
            yield from self.batches(epoch, step)
            step += 1

    def __len__(self) -> int:
        """Batches that this rank gets from the position of `resume` to the end of the epoch."""
        return max(0, self.steps(self.epoch) - self.step) * self.batches_per_step

    def _identity(self) -> dict[str, Any]:
        """Everything the order of the rows depends on."""
        digest = hashlib.sha256(self.lengths.numpy().tobytes()).hexdigest()
        return {
            "lengths_sha256": digest,
            "capacity": self.capacity,
            "rows_per_step": self.rows_per_step,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "chunk": self.chunk,
            **self.pack_options,
        }

    def state_dict(self, epoch: int, step: int) -> dict[str, Any]:
        """What a checkpoint keeps: the position the trainer has reached, and what the order depends on.

        The trainer says where it is: a loader that reads ahead has asked this sampler for more.
        """
        return {"epoch": epoch, "step": step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes; refuses a state whose rows come in another order. Ranks and rows_per_batch may differ."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the saved state has {name}={state.get(name)!r}, this sampler {value!r}: "
                    "the rows would come in another order"
                )
        self.resume(state["epoch"], state["step"])


# Columns with one entry per token.
TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks")


def cut(document: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """The part of a document that a piece names; columns that are not per token are kept as they are."""
    tokens = len(document["input_ids"])
    if piece.start + piece.length > tokens:
        raise ValueError(
            f"document {piece.document} has {tokens} tokens, wanted at least {piece.start + piece.length}: "
            "the lengths given to the packer are not those of this dataset"
        )
    if piece.length == tokens:
        return dict(document)
    packed = {"seq_lengths", "position_ids"} & document.keys()
    if packed:
        raise ValueError(
            f"document {piece.document} has {min(packed)} and cannot be cut: is it packed already?"
        )
    part = slice(piece.start, piece.start + piece.length)
    return {name: value[part] if name in TOKEN_COLUMNS else value for name, value in document.items()}


class PackedDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of documents, indexed by the pieces of a PackedSampler."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, piece: Piece) -> dict[str, Any]:
        return cut(self.dataset[piece.document], piece)

    def __len__(self) -> int:
        return len(self.dataset)
