"""Where an adapter on a packed weight begins, and the record of the base that it left.

PiSSA, and LoftQ with more than one iteration, change the base: it is requantised from W - s B A
(residual_base.py). Such an adapter is right on that base only, and alone. It is saved with the factors that
the base was made with and the digests of the base before and after; its config says `init_lora_weights:
monograph_residual`, which PEFT without monograph, and `monograph merge`, refuse. Loaded onto the same packed
base, the layer makes the residual again and compares the digests.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from monograph.nn.quant_linear import QuantLinear
from monograph.nn.residual_base import Factors, Start, base_sha256, dense_weight_of, loftq, pissa, residual
from monograph.nn.row_squares import keep_row_squares
from monograph.upstream.peft_names import PeftLinear

RESIDUAL = "monograph_residual"  # init_lora_weights of an adapter whose base was changed
ASKED = "monograph_asked"  # on a LoraConfig: what init_lora_weights and loftq_config were before
DENSE_TARGET = "monograph_dense_target"  # on a LoraConfig: a layer that PEFT itself has initialised so
_PARTS = ("lora_start_A", "lora_start_B", "lora_start_base")

_REFUSED = {
    "olora": "OLoRA subtracts its part from the base; use 'pissa', which takes the best directions",
    "corda": "CorDA subtracts its part from the base; use 'pissa'",
    "lora_ga": "LoRA-GA subtracts its part from the base; use 'pissa' or 'loftq'",
}


class StartedLora(PeftLinear):
    """PEFT's layer with the initialisations that a packed base can have."""

    residual_of: str | None = None  # the adapter that changed the base
    awaits_start: bool = False  # its record has not been loaded yet
    starts: dict[str, Start]
    lora_A: Any
    lora_B: Any

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        base = self.get_base_layer()
        if not isinstance(base, QuantLinear):
            return super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        asked, loftq_config = getattr(config, ASKED, (config.init_lora_weights, config.loftq_config))
        where = kwargs.get("target_name") or "the layer"
        _refuse_start(asked, config, where)
        changes = isinstance(asked, str) and (asked.startswith("pissa") or asked in ("loftq", RESIDUAL))
        others = [name for name in self.lora_A if name != adapter_name]
        if self.residual_of is not None or (changes and others):
            raise ValueError(
                f"{where}: adapter {adapter_name!r} meets {self.residual_of or others}: an adapter that "
                "changes its base (PiSSA, LoftQ) must be the only one on it"
            )
        if changes and hasattr(config, DENSE_TARGET):
            raise ValueError(
                f"{where} is packed and {getattr(config, DENSE_TARGET)} is not: init_lora_weights={asked!r} "
                "wants all target_modules packed, or none"
            )
        own = copy.copy(config)
        own.init_lora_weights, own.loftq_config = (True if asked == RESIDUAL else asked), loftq_config
        if asked == RESIDUAL:
            self.residual_of, self.awaits_start = adapter_name, True
            sizes = ((r, 4 * base.in_features), (base.out_features, 4 * r), (65,))
            self._hold(adapter_name, *(torch.zeros(size, dtype=torch.uint8) for size in sizes))
        super().update_layer(adapter_name, r, lora_alpha, own, **kwargs)
        if changes:
            setattr(config, ASKED, (asked, loftq_config))
            # As saved. LoftQ of one iteration leaves the base as it is: any LoRA reader may have it.
            config.init_lora_weights = True if self.residual_of is None else RESIDUAL
            config.loftq_config = {}
        return None

    def pissa_init(self, adapter_name: str, init_lora_weights: str) -> None:
        base = self.get_base_layer()
        if not isinstance(base, QuantLinear):
            return super().pissa_init(adapter_name, init_lora_weights)
        scaling = self.scaling[adapter_name]
        factors, packed, start = pissa(base, self.r[adapter_name], scaling, init_lora_weights)
        self._begin(adapter_name, factors, start)
        self._change_base(adapter_name, factors, packed, from_dense=start.against_dense)
        return None

    def loftq_init(self, adapter_name: str, config: Any) -> None:
        base = self.get_base_layer()
        if not isinstance(base, QuantLinear):
            return super().loftq_init(adapter_name, config)
        bits, iterations = _loftq_options(config.loftq_config)
        if bits != base.format.bits:
            raise ValueError(
                f"loftq_bits is {bits}, wanted {base.format.bits}: the base is {base.format.name}"
            )
        factors, made_with, packed, start = loftq(
            base, self.r[adapter_name], self.scaling[adapter_name], iterations
        )
        self._begin(adapter_name, factors, start)
        if made_with is not None:
            self._change_base(adapter_name, made_with, packed, from_dense=True)
        return None

    def _begin(self, name: str, factors: Factors, start: Start) -> None:
        for module, factor in ((self.lora_A[name], factors[0]), (self.lora_B[name], factors[1])):
            # PEFT makes it on the CPU, and moves it to its base afterwards.
            module.weight.data = factor.to(module.weight.device, module.weight.dtype, copy=True)
        if self.lora_bias[name]:
            nn.init.zeros_(self.lora_B[name].bias)
        self.starts = {**getattr(self, "starts", {}), name: start}

    def _change_base(self, name: str, made_with: Factors, packed: Any, *, from_dense: bool) -> None:
        base: Any = self.get_base_layer()
        digests = base_sha256(base.packed) + base_sha256(packed) + bytes([from_dense])
        record = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
        # float32 as bytes: no cast of the model may round them.
        tensors = (*(factor.contiguous().view(torch.uint8) for factor in made_with), record)
        self._hold(name, *tensors)
        base.put(packed)
        if hasattr(base, "row_squares"):
            keep_row_squares(base)
        self.residual_of, self.awaits_start = name, False

    def _hold(self, name: str, *tensors: torch.Tensor) -> None:
        """The record, named as PEFT names tensors: it is saved and found again with the adapter."""
        for part, tensor in zip(_PARTS, tensors, strict=True):
            holder = nn.Module()
            holder.register_buffer("weight", tensor)
            setattr(self, part, nn.ModuleDict({name: holder}))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        name = self.residual_of
        record = [key for key in state_dict if key.startswith(prefix) and holds_a_start(key)]
        if name is None and record:
            raise ValueError(start_without_residual(record[0]))
        keys = [f"{prefix}{part}.{name}.weight" for part in _PARTS]
        if name is not None and all(key in state_dict for key in keys):
            self._make_residual_again(name, prefix, *(state_dict[key] for key in keys))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def _make_residual_again(
        self, name: str, prefix: str, a: torch.Tensor, b: torch.Tensor, record: torch.Tensor
    ) -> None:
        where = prefix.rstrip(".")
        if not self.awaits_start:
            present = (getattr(self, part)[name].weight for part in _PARTS)
            if all(
                torch.equal(held, loaded.to(held.device))
                for held, loaded in zip(present, (a, b, record), strict=True)
            ):
                return
            raise ValueError(
                f"{where}: the base was changed by another start of adapter {name!r}; load it anew"
            )
        base: Any = self.get_base_layer()
        before, after, from_dense = _digests(record)
        if base_sha256(base.packed) != before:
            raise ValueError(
                f"{where}: adapter {name!r} was started on another base (sha256 {before.hex()[:12]}, this "
                f"layer has {base_sha256(base.packed).hex()[:12]})"
            )
        weight, dense = dense_weight_of(base) if from_dense else (base.dequantize(torch.float32), False)
        if from_dense and not dense:
            raise ValueError(
                f"{where}: the base of adapter {name!r} was made from the dense weights, which are not known "
                "here: load the 16-bit folder with MonographConfig instead of a packed one"
            )
        a, b = (part.to(weight.device).contiguous().view(torch.float32) for part in (a, b))
        factors = (a, b)
        packed = base.requantize(residual(weight, *factors, self.scaling[name]))
        if base_sha256(packed) != after:
            raise ValueError(
                f"{where}: the residual base of adapter {name!r} comes out with sha256 "
                f"{base_sha256(packed).hex()[:12]}, wanted {after.hex()[:12]}: rule or dense weights differ"
            )
        self._change_base(name, factors, packed, from_dense=from_dense)

    def refuse_the_bare_residual(self, options: dict[str, Any]) -> None:
        """What is left of a changed base is no model: it must not compute without its adapter."""
        name = self.residual_of
        if name is None or self.merged:
            return
        if self.awaits_start:
            raise RuntimeError(
                f"adapter {name!r} has {RESIDUAL}, but its record was not loaded: use "
                "PeftModel.from_pretrained(base, FOLDER)"
            )
        if self.disable_adapters or name not in self.active_adapters or options.get("adapter_names"):
            raise RuntimeError(
                f"adapter {name!r} is off, but it took its start out of the base, which is not the base "
                "model any more; load the base a second time for what needs it without the adapter"
            )

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """PEFT calls it for `unload` and `merge_and_unload`."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        self._refuse_to_lose("unload")
        return self.get_base_layer()

    def delete_adapter(self, adapter_name: str) -> None:
        if adapter_name == self.residual_of:
            self._refuse_to_lose("delete_adapter")
        super().delete_adapter(adapter_name)

    def _refuse_to_lose(self, call: str) -> None:
        if self.residual_of is not None and self.residual_of not in self.merged_adapters:
            raise ValueError(
                f"{call}: adapter {self.residual_of!r} took its start out of the base, which would be left "
                "without it; merge it, or load the base again"
            )


def _digests(record: torch.Tensor) -> tuple[bytes, bytes, bool]:
    data = bytes(record.cpu().tolist())
    return data[:32], data[32:64], bool(data[64])


def _loftq_options(given: dict[str, Any]) -> tuple[int, int]:
    """(bits, iterations) of a loftq_config, with PEFT's defaults."""
    for key in given:
        if key not in ("loftq_bits", "loftq_iter"):
            raise ValueError(f"loftq_config has {key!r}, wanted loftq_bits and loftq_iter")
    return given.get("loftq_bits", 4), given.get("loftq_iter", 1)


def holds_a_start(key: str) -> bool:
    """Whether a tensor of an adapter is part of the record of its base."""
    return any(f".{part}." in key for part in _PARTS)


def start_without_residual(key: str) -> str:
    """The message for a record whose config has lost its mark."""
    return (
        f"{key}: the adapter has changed its packed base, but init_lora_weights of its adapter_config.json "
        f"is not {RESIDUAL!r}: set it to that again"
    )


def _refuse_start(asked: Any, config: Any, where: str) -> None:
    """Initialisations that write the base and are not built for packed ones."""
    for name, reason in _REFUSED.items():
        if isinstance(asked, str) and asked.lower().startswith(name):
            raise ValueError(f"{where}: init_lora_weights is {asked!r} on a packed weight: {reason}")
    if getattr(config, "kasa_config", None) is not None:
        raise ValueError(f"{where}: kasa_config is set on a packed weight: KaSA truncates the base")
