"""Collators: features to tensors, everything that depends on document boundaries computed once per batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from monograph.ops.linear_cross_entropy import IGNORED as IGNORED

# What a feature may hold besides input_ids. Other per-token columns are refused: dropping them would train on
# something else than the dataset says.
_KNOWN = {"input_ids", "labels", "attention_mask", "position_ids", "seq_lengths", "completion_mask"}
_KNOWN |= {"assistant_masks", "length", "special_tokens_mask"}


class _Document(NamedTuple):
    input_ids: torch.Tensor
    labels: torch.Tensor


def _integers(feature: Mapping[str, Any], name: str, where: str) -> torch.Tensor:
    values = torch.as_tensor(feature[name])
    if values.dim() != 1:
        raise ValueError(
            f"{where}: {name} has shape {tuple(values.shape)}, wanted one dimension: "
            "a feature is one document or one packed row, not a batch"
        )
    if values.is_floating_point() and values.numel():
        raise ValueError(f"{where}: {name} has dtype {values.dtype}, wanted integers")
    return values.long()


def _check_columns(feature: Mapping[str, Any], tokens: int, where: str) -> None:
    for name, value in feature.items():
        listed = isinstance(value, list | tuple) and len(value) == tokens
        per_token = listed and tokens > 0 and isinstance(value[0], int | float)
        if name not in _KNOWN and (per_token or hasattr(value, "__array__")):  # also tensors and numpy arrays
            raise ValueError(
                f"{where}: column {name!r} is not one this collator knows ({', '.join(sorted(_KNOWN))}); "
                "remove it from the dataset if the model does not need it"
            )


def _labels(feature: Mapping[str, Any], input_ids: torch.Tensor, where: str) -> torch.Tensor:
    """The labels given, else the tokens; tokens outside a completion or assistant mask are no targets."""
    labels = _integers(feature, "labels", where) if "labels" in feature else input_ids
    for name in ("labels", "completion_mask", "assistant_masks", "attention_mask"):
        if name in feature and len(feature[name]) != input_ids.numel():
            raise ValueError(
                f"{where}: {name} has {len(feature[name])} entries, input_ids {input_ids.numel()}"
            )
    if "attention_mask" in feature and not _integers(feature, "attention_mask", where).bool().all():
        raise ValueError(f"{where}: attention_mask has zeros; give documents without padding")
    for name in ("completion_mask", "assistant_masks"):
        if name in feature:
            labels = labels.where(_integers(feature, name, where).bool(), IGNORED)
    return labels


def _document_lengths(feature: Mapping[str, Any], tokens: int, where: str) -> list[int]:
    """One length, or those of the documents of a packed row: seq_lengths, or where position_ids restart."""
    if "seq_lengths" in feature:
        lengths: list[int] = _integers(feature, "seq_lengths", where).tolist()
        if sum(lengths) != tokens or min(lengths, default=0) < 0:
            raise ValueError(f"{where}: seq_lengths sum to {sum(lengths)}, input_ids has {tokens} tokens")
        return lengths
    if "position_ids" not in feature or not tokens:
        return [tokens]
    positions = _integers(feature, "position_ids", where)
    starts = (positions == 0).nonzero()[:, 0]
    lengths = starts.diff(append=starts.new_tensor([tokens])).tolist()
    restarting = torch.cat([torch.arange(length) for length in lengths]) if lengths else positions[:0]
    if not torch.equal(positions, restarting):
        raise ValueError(
            f"{where}: position_ids do not count from 0 in each document, so they do not say where documents "
            "begin; give seq_lengths instead"
        )
    return lengths


def _documents(features: Iterable[Mapping[str, Any]]) -> list[list[_Document]]:
    """The documents of each feature, without empty ones; the first token of each is no target."""
    rows = []
    for number, feature in enumerate(features):
        where = f"feature {number}"
        if "input_ids" not in feature:
            raise ValueError(f"{where}: no input_ids, only {', '.join(map(str, feature)) or 'nothing'}")
        input_ids = _integers(feature, "input_ids", where)
        _check_columns(feature, input_ids.numel(), where)
        lengths = _document_lengths(feature, input_ids.numel(), where)
        labels = _labels(feature, input_ids, where)
        parts = zip(input_ids.split(lengths), labels.split(lengths), strict=True)
        row = [_Document(ids, targets.clone()) for ids, targets in parts if ids.numel()]
        for document in row:
            document.labels[0] = IGNORED
        rows.append(row)
    return rows


def _rounded_up(tokens: int, multiple: int) -> int:
    return max(1, -(-tokens // multiple)) * multiple


def _joined(parts: Sequence[torch.Tensor], length: int, fill: int) -> torch.Tensor:
    """The parts behind each other as [1, length], the rest filled."""
    row = torch.full((1, length), fill, dtype=torch.int64)
    if parts:
        torch.cat(list(parts), out=row[0, : sum(part.numel() for part in parts)])
    return row


class PackedCollator:
    """Flattens documents and packed rows into one row, [1, T], with everything a model needs to keep them
    apart.

        collate = PackedCollator(pad_to_multiple_of=4096, max_documents=64)
        batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])

    A feature is a document, or a row packed before: with `seq_lengths` as TRL writes them, or
    `position_ids` that restart at 0. Several packed rows become one longer row, [1, T1 + T2], which is the
    same to a model that is told the boundaries; a batch dimension above 1 is never made from packed rows.
    It does not matter whether a model trains or is evaluated.

    The batch:

    - `input_ids`, `labels`, `position_ids`: int64 [1, T]. Positions restart in each document. Labels are
      those given, else the tokens, and -100 on the first token of each document: no document predicts the
      next.
    - `cu_seqlens`: int32 [max_documents + 1]. Where documents begin, then the end of the last one, repeated
      to fill the slots. Padding lies behind it, in no document.
    - `cu_seq_lens_q`, `cu_seq_lens_k`: int32 [max_documents + 2], the names of flash attention in
      transformers. As `cu_seqlens`, and at last T: here padding is a document of its own, because flash
      kernels leave rows outside every document unwritten, and whatever lay there would reach the gradient.
    - `max_length_q`, `max_length_k`: int. T if max_documents is given: a bound that stays the same from
      batch to batch; else the longest document.
    - `use_cache`: False. transformers' SDPA and eager attention see from `position_ids` that a row is packed,
      but only without a KV cache; with one, its default, documents attend to each other and nothing is said.
    - `num_items_in_batch`: int64 []. Targets in this batch, by which transformers' models divide the summed
      loss. For several micro-batches or ranks replace it by `total_target_tokens(batches)`.

    pad_to_multiple_of: T is the least positive multiple that holds the tokens. With the capacity of the
        packed rows (times the rows per batch) every batch has the same shape. An empty list gives a row of
        padding.
    max_documents: fixes the sizes of the boundary tensors, so that a compiled model is compiled once; more
        documents than that are an error. None: as many as the batch has.
    pad_token_id: the token of the padding, which nothing depends on.
    transformers_keywords: False leaves `use_cache` and the flash names out, for models that do not know them.
    """

    def __init__(
        self,
        *,
        pad_to_multiple_of: int = 1,
        max_documents: int | None = None,
        pad_token_id: int = 0,
        transformers_keywords: bool = True,
    ) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}, wanted 1 or more")
        if max_documents is not None and max_documents < 1:
            raise ValueError(f"max_documents is {max_documents}, wanted 1 or more, or None")
        self.pad_to_multiple_of = pad_to_multiple_of
        self.max_documents = max_documents
        self.pad_token_id = pad_token_id
        self.transformers_keywords = transformers_keywords

    def _boundaries(self, lengths: list[int]) -> torch.Tensor:
        slots = len(lengths) if self.max_documents is None else self.max_documents
        if len(lengths) > slots:
            raise ValueError(
                f"the batch has {len(lengths)} documents, cu_seqlens has room for max_documents={slots}; "
                "raise it, or pack with fewer documents in a row: pack(..., max_documents=...)"
            )
        padded = torch.zeros(slots + 1, dtype=torch.int64)
        padded[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int64)
        return padded.cumsum(0).to(torch.int32)

    def __call__(self, features: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        documents = [document for row in _documents(features) for document in row]
        lengths = [document.input_ids.numel() for document in documents]
        total = _rounded_up(sum(lengths), self.pad_to_multiple_of)
        positions = [torch.arange(length) for length in (*lengths, total - sum(lengths))]
        labels = _joined([document.labels for document in documents], total, IGNORED)
        boundaries = self._boundaries(lengths)
        batch: dict[str, Any] = {
            "input_ids": _joined([document.input_ids for document in documents], total, self.pad_token_id),
            "labels": labels,
            "position_ids": _joined(positions, total, 0),
            "cu_seqlens": boundaries,
            "num_items_in_batch": (labels != IGNORED).sum(),
        }
        if self.transformers_keywords:
            flash = torch.cat((boundaries, boundaries.new_tensor([total])))
            longest = total if self.max_documents is not None else int(flash.diff().max())
            batch |= {"cu_seq_lens_q": flash, "cu_seq_lens_k": flash}
            batch |= {"max_length_q": longest, "max_length_k": longest, "use_cache": False}
        return batch


class PaddedCollator:
    """One document per row, padded on the right to the longest: the batch that packing is compared with.

    The batch: input_ids, labels, position_ids and attention_mask, int64 [B, T], and num_items_in_batch as
    PackedCollator has it. A packed row is refused: padding mask and positions could not keep its documents
    apart.
    """

    def __init__(self, *, pad_to_multiple_of: int = 1, pad_token_id: int = 0) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}, wanted 1 or more")
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_token_id = pad_token_id

    def __call__(self, features: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        rows = _documents(features)
        for number, row in enumerate(rows):
            if len(row) != 1:
                raise ValueError(
                    f"feature {number} has {len(row)} documents, wanted 1; PackedCollator takes packed rows"
                )
        if not rows:
            raise ValueError("the batch has no documents, wanted 1 or more")
        documents = [row[0] for row in rows]
        longest = max(document.input_ids.numel() for document in documents)
        total = _rounded_up(longest, self.pad_to_multiple_of)
        labels = torch.cat([_joined([document.labels], total, IGNORED) for document in documents])
        ids = [_joined([document.input_ids], total, self.pad_token_id) for document in documents]
        mask = [_joined([torch.ones_like(document.input_ids)], total, 0) for document in documents]
        return {
            "input_ids": torch.cat(ids),
            "labels": labels,
            "position_ids": torch.arange(total).expand(len(documents), total).contiguous(),
            "attention_mask": torch.cat(mask),
            "num_items_in_batch": (labels != IGNORED).sum(),
        }


def total_target_tokens(
    batches: Sequence[Mapping[str, Any]],
    group: torch.distributed.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Targets in the micro-batches of a step on all ranks, int64 []: what to divide the summed loss by.

        total = total_target_tokens(batches)
        for batch in batches:
            loss = model(**{**batch, "num_items_in_batch": total}).loss  # sum over this batch / total
            (loss * world_size).backward()  # world_size if gradients are averaged over the ranks

    Adds over the ranks of `group` if `torch.distributed` is initialised; `device` is where its backend works.
    """
    counts = [batch["num_items_in_batch"] for batch in batches]
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        total = total.to(device)
        torch.distributed.all_reduce(total, group=group)
    return total
