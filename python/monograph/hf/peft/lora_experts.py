"""LoraExperts: PEFT's LoRA on the parameters of experts (`target_parameters`), computed by one operator.

It is PEFT's own `lora.ParamWrapper` in everything that people touch: names, state dict, adapters, scaling,
nesting (the wrapper of `down_proj` around that of `gate_up_proj`). PEFT adds B A to every expert in every
forward; here the outermost wrapper hands the factors of all of them to `monograph::experts`, and no W + dW
ever exists. Over packed experts PEFT makes this class from the start; dense ones are taken over by
`monograph.optimize`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from monograph.hf.peft.lora_linear import rounded_once
from monograph.hf.transformers.experts import experts_forward, experts_kind, is_experts
from monograph.nn.packed_experts import ExpertShare, LowRank, PackedExperts
from monograph.ops.providers import may_take_over
from monograph.quant.stack_pair import Stack
from monograph.upstream.peft_names import (
    ParamWrapper,
    caches,
    check_adapters_to_merge,
    check_forward_args,
    convert_config,
    include_all_linear,
)
from monograph.upstream.torch_names import hooks

_ROUTER = "gate.weight"  # PEFT's name of it


class LoraExperts(ParamWrapper):
    """See the module's first lines."""

    # PEFT's attributes; torch types what a ModuleDict holds as Tensor | Module.
    base_layer: Any
    parameter_name: str
    lora_A: Any
    lora_B: Any
    num_experts: int
    scaling: dict[str, float]
    # Over experts that are spread with their factors: what to compute with in the place of the parameters, by
    # lora_A or lora_B and adapter, once for each rank. A training step sets it and differentiates by it.
    given: dict[str, torch.Tensor] | None = None

    @classmethod
    def take_over(cls, layer: Any) -> None:
        """Turns PEFT's wrapper into ours, in place."""
        layer.__class__ = cls

    def wrappers(self) -> Iterator[LoraExperts]:
        """This one and those within it."""
        layer: Any = self
        while isinstance(layer, LoraExperts):
            yield layer
            layer = layer.base_layer

    def _low_rank(self, dtype: torch.dtype) -> LowRank | None:
        """The active adapters of this parameter, side by side."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return None
        names = [name for name in self.active_adapters if name in self.lora_A]
        if not names:
            return None
        both = [[self._factor(which, name) for name in names] for which in ("lora_A", "lora_B")]
        first, second = ([t if t.dtype == dtype else t.float() for t in part] for part in both)
        if len(names) == 1:
            return LowRank(first[0], second[0], self.scaling[names[0]])
        share = self._share()
        count = self.num_experts if share is None else share.held
        scaled = [a * self.scaling[name] for name, a in zip(names, first, strict=True)]
        a = torch.cat([one.unflatten(-2, (count, -1)) for one in scaled], dim=-2)
        b = torch.cat([one.unflatten(-1, (-1, count)) for one in second], dim=-2)
        return LowRank(a.flatten(-3, -2), b.flatten(-2), 1.0)

    def _share(self) -> ExpertShare | None:
        """Where the factors are those of this rank's experts alone."""
        share = getattr(self.get_base_layer(), "expert_share", None)
        return share if share is not None and share.adapter else None

    def _factor(self, which: str, name: str) -> torch.Tensor:
        if self.given is not None and f"{which}.{name}" in self.given:
            return self.given[f"{which}.{name}"]
        weight: torch.Tensor = getattr(self, which)[name].weight
        share = self._share()
        return weight if share is None or weight.dim() == 3 else weight.expand(share.ranks, -1, -1)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        check_forward_args(self, x, *args, **kwargs)
        base = self.get_base_layer()
        lora = {}
        for wrapper in self.wrappers():
            low = wrapper._low_rank(x.dtype)
            if low is not None:
                lora[wrapper.parameter_name] = low
        if isinstance(base, PackedExperts):
            return base(x, *args, **kwargs, lora=lora)
        # Somebody wants the layer called, or has moved it to a device without a kernel: PEFT's way, around
        # this wrapper and those within.
        if any(hooks(base)) or not may_take_over(x.device.type, "experts"):
            return super().forward(x, *args, **kwargs)
        return experts_forward(base, x, *args, **kwargs, lora=lora)

    # Merging replaces packed bytes by a dense parameter, as with linear layers; unmerging brings them back.

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        base, name = self.get_base_layer(), self.parameter_name
        aside = caches(self).get("packed_base")
        if not isinstance(base, PackedExperts) or (name not in base.stacks and aside is None):
            return super().merge(safe_merge, adapter_names)
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return None
        packed = base.packed(name) if aside is None else aside
        total = [*self.merged_adapters, *names]
        weight = self._merged(packed, total, base.experts_kind.transposed)
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"the merged weight has NaN or infinite entries, wanted finite: adapters {total}"
            )
        if name not in base.stacks:
            base.put_packed(name, packed)
        base.put_dense(name, weight)
        caches(self)["packed_base"] = packed
        self.merged_adapters = total
        return None

    @torch.no_grad()
    def _merged(self, packed: Stack, names: list[str], transposed: bool) -> torch.Tensor:
        """The rule of docs/explain/merge.md, one expert at a time: computed in 64 bits, rounded once."""
        weight, count = packed.dequantize(), self.num_experts
        for expert in range(count):
            total = weight[expert].double()
            for name in names:
                a = self.lora_A[name].weight.reshape(count, -1, weight.shape[2])[expert].double()
                b = self.lora_B[name].weight.reshape(weight.shape[1], -1, count)[..., expert].double()
                total += (b @ a) * self.scaling[name]
            weight[expert] = rounded_once(total, weight.dtype)
        return weight.transpose(1, 2).contiguous() if transposed else weight

    def unmerge(self) -> None:
        packed = caches(self).pop("packed_base", None)
        if packed is None:
            return super().unmerge()
        base: Any = self.get_base_layer()
        base.put_packed(self.parameter_name, packed)
        self.merged_adapters = []
        return None


# PEFT looks for its wrapper by this name when a further adapter is added.
LoraExperts.__name__ = "ParamWrapper"


def _fusible(base: nn.Module, targets: set[str]) -> bool:
    """Whether dense experts are of a known kind with LoRA on their weights alone, and nobody wants them to be
    called."""
    try:
        kind = experts_kind(base)
    except ValueError:
        return False
    there = all(may_take_over(p.device.type, "experts") for p in base.parameters())
    return there and targets <= set(kind.names) and not any(hooks(base))


def take_over_experts(model: nn.Module) -> list[Any]:
    """Every wrapper of PEFT whose experts are known. A parametrised parameter is refused if it is not.

    Dense experts with LoRA on a bias too stay PEFT's.
    """
    taken = []
    wrappers = [(path, m) for path, m in model.named_modules() if isinstance(m, ParamWrapper)]
    targets: dict[int, set[str]] = {}
    for _, layer in wrappers:
        targets.setdefault(id(layer.get_base_layer()), set()).add(layer.parameter_name)
    for path, layer in wrappers:
        base, name = layer.get_base_layer(), layer.parameter_name
        if isinstance(base, PackedExperts) or (is_experts(base) and _fusible(base, targets[id(base)])):
            LoraExperts.take_over(layer)
            taken.append(layer)
        elif name in getattr(base, "parametrizations", ()):
            raise ValueError(
                f"{path}: {name} of {type(base).__name__} is parametrised already, and PEFT would add its "
                "LoRA again in every forward; wanted a plain parameter"
            )
    return taken


def all_linear_without_router(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """PEFT takes "all-linear" of a model with fused experts for its experts and its router too, as when they
    were linear layers. LoRA on a router is a parametrisation, which breaks the graph: it is left out unless
    the config names it.
    """
    if not isinstance(config.target_modules, str) or config.target_modules.lower() != "all-linear":
        return config
    converted = copy.deepcopy(config)
    convert_config(converted, model=model, conversions=None)
    if converted.target_modules == config.target_modules:
        return config
    asked = set(config.target_parameters or ())
    kept = set(converted.target_parameters or ()) - ({_ROUTER} - asked)
    return replace(converted, target_parameters=sorted(kept))


def all_linear_and(model: nn.Module, config: LoraConfig, names: Sequence[str]) -> LoraConfig:
    """A config of "all-linear" with more layers, by the names or ends of names that PEFT takes."""
    config = all_linear_without_router(model, config)
    if isinstance(config.target_modules, str):
        config = include_all_linear(copy.deepcopy(config), model)
    found: Any = config.target_modules
    return replace(config, target_modules=sorted({*found, *names}))


def expert_parameters(model: nn.Module) -> list[str]:
    """`target_parameters` for all experts of a model, as people write them: `mlp.experts.gate_up_proj`."""
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts) or is_experts(module):
            kind = module.experts_kind if isinstance(module, PackedExperts) else experts_kind(module)
            found |= {".".join([*path.split(".")[-2:], name]): None for name in kind.names}
    return list(found)
