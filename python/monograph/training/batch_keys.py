"""What a step reads of a batch. Every key is passed on, known to repeat another, or refused by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from monograph.packing.unsupported_attention import check_attention_sees
from monograph.training.loss import causal_parts

Tensors = dict[str, torch.Tensor]

# By rows and tokens; the names that models of transformers share.
_BY_TOKEN = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask")
DOCUMENTS = "cu_seqlens"
KNOWN = (*_BY_TOKEN, DOCUMENTS)
_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k")
# Numbers that repeat what the tensors say. The step counts its own targets, and never has a cache.
_REPEATED = ("num_items_in_batch", "max_length_q", "max_length_k", "use_cache", "return_dict")


def _named_by(forward: Any) -> frozenset[str]:
    """The arguments that a forward names; those of its `**kwargs` may be read by nobody."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind in kinds)


class BatchKeys:
    """Reads batches for a model: `keys(batch, "micro-batch 3")` gives the tensors that its forward gets.

    - input_ids, labels or shift_labels, position_ids, attention_mask; documents by cu_seqlens or by
      flash attention's cu_seq_lens_q and cu_seq_lens_k.
    - Tensors that the forward of the model's body names, as pixel_values.
    - None is no entry. Everything else is an error.
    """

    def __init__(self, model: nn.Module) -> None:
        causal, self._body, _ = causal_parts(model, "TrainStep")
        self._kind = type(causal).__name__
        self.named = _named_by(self._body.forward)
        config: Any = causal.config
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        self._three = "mrope_section" in rope or hasattr(self._body, "get_rope_index")

    def __call__(self, batch: Mapping[str, Any], where: str = "the batch") -> Tensors:
        given = {name: value for name, value in batch.items() if value is not None}
        tensors: Tensors = {}
        for name, value in given.items():
            if name in _REPEATED:
                continue
            if name not in KNOWN and name not in _FLASH and name not in self.named:
                raise ValueError(
                    f"{where} has {name!r}, which {type(self._body).__name__}.forward does not name; wanted "
                    f"{', '.join(KNOWN)} or one of its arguments. Leave it out if the model needs it not"
                )
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{where}: {name} is a {type(value).__name__}, wanted a tensor")
            tensors[name] = value
        self._check_shapes(tensors, where)
        self._one_set_of_documents(tensors, where)
        return tensors

    def _check_shapes(self, tensors: Tensors, where: str) -> None:
        ids = tensors.get("input_ids")
        if ids is None:
            raise ValueError(
                f"{where} has no input_ids, only {_listed(tensors)}; wanted int64 [rows, tokens]"
            )
        if ids.dim() != 2 or ids.numel() == 0:
            raise ValueError(
                f"{where}: input_ids has shape {tuple(ids.shape)}, wanted [rows, tokens], 1 or more of each"
            )
        if "labels" not in tensors and "shift_labels" not in tensors:
            raise ValueError(
                f"{where} has no labels, only {_listed(tensors)}; wanted labels or shift_labels, "
                "[rows, tokens]"
            )
        for name in ("labels", "shift_labels"):
            if name in tensors and tensors[name].shape != ids.shape:
                raise ValueError(
                    f"{where}: {name} has shape {tuple(tensors[name].shape)}, wanted {tuple(ids.shape)} as "
                    "input_ids"
                )
        rows, tokens = ids.shape
        positions = tensors.get("position_ids")
        if positions is not None:
            shape = tuple(positions.shape)
            three = self._three and len(shape) == 3
            if len(shape) != 2 + three or shape[-1] != tokens or shape[-2] not in (1, rows):
                wanted = f"({rows}, {tokens})" + (f" or (3, {rows}, {tokens})" if self._three else "")
                raise ValueError(f"{where}: position_ids has shape {shape} on {self._kind}, wanted {wanted}")
        mask = tensors.get("attention_mask")
        if mask is not None and mask.dim() == 2 and tuple(mask.shape) != (rows, tokens):
            raise ValueError(
                f"{where}: attention_mask has shape {tuple(mask.shape)}, wanted {(rows, tokens)} as input_ids"
            )

    def _one_set_of_documents(self, tensors: Tensors, where: str) -> None:
        """flash attention's offsets repeat the collator's, or are the documents themselves."""
        q, k = (tensors.pop(name, None) for name in _FLASH)
        name = DOCUMENTS
        if DOCUMENTS not in tensors:
            if q is None and k is None:
                return
            if q is None or k is None or not torch.equal(q, k):
                raise ValueError(
                    f"{where}: cu_seq_lens_q and cu_seq_lens_k differ, wanted the same documents in both"
                )
            tensors[DOCUMENTS], name = q.to(torch.int32), _FLASH[0]
        cu, rows = tensors[DOCUMENTS], tensors["input_ids"].shape[0]
        if cu.dim() != 1 or rows != 1:
            raise ValueError(
                f"{where}: {name} has shape {tuple(cu.shape)} for {rows} rows, wanted [documents + 1] and "
                "one row"
            )
        check_attention_sees(self._body, name, {**tensors, name: cu})


def _listed(tensors: Tensors) -> str:
    return ", ".join(tensors) or "nothing"
