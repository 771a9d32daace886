"""PEFT's own calls on packed weights: `get_peft_model`, `PeftModel.from_pretrained`, TRL's `peft_config=`.

PEFT chooses the class of a LoRA layer by that of its base and takes a QuantLinear for an nn.Linear. Its layer
would write initialisations and merges into a dequantised temporary. `install` makes it choose `LoraLinear`,
which computes as PEFT does until `monograph.optimize`, but merges and initialises for packed weights.
Read in PEFT 0.21.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from math import prod
from typing import Any

from peft import PeftModel

from monograph.hf.peft import residual_adapters
from monograph.hf.peft.lora_experts import LoraExperts
from monograph.hf.peft.lora_linear import LoraLinear
from monograph.hf.peft.lora_start import ASKED, DENSE_TARGET, RESIDUAL
from monograph.nn.packed_embedding import PackedEmbedding
from monograph.nn.packed_experts import PackedExperts
from monograph.nn.quant_linear import QuantLinear
from monograph.upstream.peft_names import BaseTunerLayer, dispatch_default, replace_dispatch

_PACKED = (QuantLinear, PackedExperts, PackedEmbedding)
_peft_model: Any = PeftModel
_dispatch_default = dispatch_default  # before it is replaced
_count_stored = _peft_model.get_nb_trainable_parameters
_make = _peft_model.__init__


def install() -> None:
    replace_dispatch(_dispatch)
    _peft_model.get_nb_trainable_parameters = _count
    _peft_model.__init__ = _checked_make
    residual_adapters.install()


@wraps(_make)
def _checked_make(self: Any, model: Any, peft_config: Any, *arguments: Any, **options: Any) -> None:
    refuse_packed_copies(model, getattr(peft_config, "modules_to_save", None))
    _refuse_packed_tokens(model, getattr(peft_config, "trainable_token_indices", None))
    _make(self, model, peft_config, *arguments, **options)


def _refuse_packed_tokens(model: Any, indices: Any) -> None:
    """PEFT's layer of trained tokens would decode the whole table in each step."""
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if indices and isinstance(table, PackedEmbedding):
        raise ValueError(
            f"trainable_token_indices: the table of tokens is packed ({table.format.name}); wanted one of "
            "16 or 32 bits"
        )


def refuse_packed_copies(model: Any, names: Sequence[str] | None, key: str = "modules_to_save") -> None:
    """modules_to_save trains copies of whole modules; of packed weights there is nothing to train."""
    for path, module in model.named_modules():
        if not any(path == name or path.endswith(f".{name}") for name in names or ()):
            continue
        packed = next(
            (inner for inner in module.modules() if isinstance(inner, _PACKED)),
            None,
        )
        if packed is not None:
            experts = isinstance(packed, PackedExperts)
            instead = "target_parameters" if experts else "target_modules"
            raise ValueError(
                f"{key} names {path}, whose weights are packed and are not trained "
                f"themselves; wanted layers of 16 or 32 bits: name it in {instead}, or leave it out"
            )


def _dispatch(target: Any, adapter_name: str, config: Any, parameter_name: Any = None, **options: Any) -> Any:
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if parameter_name is not None and isinstance(base, PackedExperts):
        names = base.experts_kind.names
        if parameter_name not in names:
            raise ValueError(
                f"target_parameters names {parameter_name} of packed experts, wanted {' or '.join(names)}"
            )
        return LoraExperts(target, adapter_name, parameter_name=parameter_name, config=config, **options)
    if parameter_name is None and not isinstance(base, QuantLinear):
        _watch_dense_target(base, config, options.get("target_name") or "a layer")
    if parameter_name is not None or not isinstance(base, QuantLinear):
        return _dispatch_default(target, adapter_name, config, parameter_name=parameter_name, **options)
    if config.fan_in_fan_out:
        raise ValueError("fan_in_fan_out is True, wanted False: a QuantLinear is [out_features, in_features]")
    return LoraLinear(target, adapter_name, config=config, **options)


def _watch_dense_target(base: Any, config: Any, where: str) -> None:
    """Initialisations that change the base: packed and dense layers do not mix."""
    start = config.init_lora_weights
    asked = getattr(config, ASKED, (start,))[0]
    if start == RESIDUAL != asked:
        raise ValueError(
            f"{where} is {type(base).__name__}, not packed, and other targets are packed: init_lora_weights="
            f"{asked!r} wants all target_modules packed, or none"
        )
    if start == RESIDUAL:
        raise ValueError(
            f"{where}: the adapter belongs to a packed base that it has changed ({RESIDUAL}), this layer is "
            f"{type(base).__name__}, wanted QuantLinear; load the base as in training"
        )
    if isinstance(start, str) and (start.startswith("pissa") or start == "loftq"):
        setattr(config, DENSE_TARGET, where)


def _count(model: Any) -> tuple[int, int]:
    """A packed weight counts by its elements, as bitsandbytes' do."""
    trainable, total = _count_stored(model)
    for layer in model.modules():
        if isinstance(layer, PackedEmbedding):
            if layer.is_head:
                continue  # counted there
            total += layer.num_embeddings * layer.embedding_dim - layer.values.numel()
        elif isinstance(layer, QuantLinear):
            stored = sum(getattr(layer, name).numel() for name in layer.stored_names)
            total += layer.out_features * layer.in_features - stored
        elif isinstance(layer, PackedExperts):
            for name in layer.stacks:
                packed = layer.packed(name)
                total += prod(packed.shape) - packed.nbytes
    return trainable, total
