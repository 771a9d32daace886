"""The micro-batches of every step, as a function of (seed, epoch, step) and of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from monograph.packing import PackedCollator, PackedDataset, PackedSampler, PaddedCollator
from monograph.packing.collator import IGNORED
from monograph.packing.packed_rows import Piece
from monograph.recipe.config.keys import Recipe
from monograph.recipe.run.schedule import Epochs


def _slots(lengths: list[int], capacity: int) -> int:
    """Documents a packed row may hold: four times the average, so that few rows reach the bound."""
    mean = sum(lengths) / len(lengths)
    return max(1, min(capacity // max(1, min(lengths)), max(16, round(4 * capacity / mean))))


class Batches:
    """Packed or padded micro-batches of prepared documents.

    Packed rows all have sequence_len tokens; padded batches have micro_batch_size rows, the last too, so
    that nothing is compiled for the end of an epoch.
    """

    def __init__(self, recipe: Recipe, documents: Any, pad_token_id: int, *, training: bool) -> None:
        self.packing = recipe.sample_packing if training else recipe.packs_evaluation
        self.rows = recipe.micro_batch_size if training else recipe.eval_batch_size or recipe.micro_batch_size
        self._pad = pad_token_id
        self._documents = PackedDataset(documents)
        lengths = [len(ids) for ids in documents["input_ids"]]
        slots = _slots(lengths, recipe.sequence_len) if self.packing else 1
        steps = recipe.gradient_accumulation_steps if training else 1
        self.sampler = PackedSampler(
            lengths,
            recipe.sequence_len,
            rows_per_step=self.rows * steps,
            rows_per_batch=self.rows,
            seed=recipe.seed,
            rank=0,
            world_size=1,
            max_documents=slots,
            shuffle=training and recipe.shuffle_merged_datasets,
            strategy="best_fit_decreasing" if recipe.shuffle_merged_datasets or not training else "first_fit",
        )
        self._collate: PackedCollator | PaddedCollator
        if self.packing:
            self._collate = PackedCollator(
                pad_to_multiple_of=recipe.sequence_len * self.rows,
                max_documents=slots * self.rows,
                pad_token_id=pad_token_id,
            )
        else:
            multiple = recipe.sequence_len if recipe.pad_to_sequence_len else 8
            self._collate = PaddedCollator(pad_to_multiple_of=multiple, pad_token_id=pad_token_id)

    @property
    def fixed_shape(self) -> bool:
        """Whether all batches have the same shape."""
        return self.packing or self._collate.pad_to_multiple_of > 8

    def _batch(self, pieces: list[Piece]) -> dict[str, Any]:
        features: list[Mapping[str, Any]] = [self._documents[piece] for piece in pieces]
        if not self.packing:  # rows without a target
            features += [{"input_ids": [self._pad], "labels": [IGNORED]}] * (self.rows - len(features))
        return self._collate(features)

    def step(self, epoch: int, step: int) -> LazyBatches:
        """The micro-batches of a step over all ranks; at the end of an epoch there may be fewer."""
        return LazyBatches(self._batch, [pieces for pieces in self.sampler.batches(epoch, step) if pieces])

    def all(self) -> LazyBatches:
        """All batches once, for evaluation."""
        steps = (self.sampler.batches(0, step) for step in range(self.sampler.steps(0)))
        return LazyBatches(self._batch, [pieces for batches in steps for pieces in batches if pieces])

    def first(self, count: int) -> LazyBatches:
        """The first micro-batches of the run, not more than an epoch has."""
        found: list[list[Piece]] = []
        for step in range(self.sampler.steps(0)):
            found += [pieces for pieces in self.sampler.batches(0, step) if pieces]
            if len(found) >= count:
                break
        return LazyBatches(self._batch, found[:count])

    def epochs(self, recipe: Recipe) -> Epochs:
        """The steps of the run: num_epochs, cut by max_steps."""
        whole, part = int(recipe.num_epochs), recipe.num_epochs % 1
        lengths: list[int] = []
        last_whole = None
        for epoch in range(whole + (part > 0)):
            steps = self.sampler.steps(epoch)
            wanted = steps if epoch < whole else max(1, round(steps * part))
            if recipe.max_steps is not None and recipe.max_steps > 0:
                wanted = min(wanted, recipe.max_steps - sum(lengths))
            if wanted <= 0:
                break
            lengths.append(wanted)
            last_whole = steps
        return Epochs(lengths, last_whole)


class LazyBatches(Sequence[dict[str, Any]]):
    """Batches that are collated when they are read: a rank reads its own. Those are kept."""

    def __init__(self, collate: Callable[[list[Piece]], dict[str, Any]], pieces: list[list[Piece]]) -> None:
        self._collate, self._pieces = collate, pieces
        self._made: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> LazyBatches: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return LazyBatches(self._collate, self._pieces[index])
        place = range(len(self))[index]  # IndexError behind the last: iteration ends there
        if place not in self._made:
            self._made[place] = self._collate(self._pieces[place])
        return self._made[place]


def token_counts(batches: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Tokens of documents in these batches, and tokens computed."""
    documents = computed = 0
    for batch in batches:
        computed += batch["input_ids"].numel()
        packed = "cu_seqlens" in batch
        documents += int(batch["cu_seqlens"][-1] if packed else batch["attention_mask"].sum())
    return documents, computed
