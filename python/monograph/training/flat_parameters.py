"""All trainable parameters of a model behind each other in one float32 tensor, and AdamW over it.

An adapter has hundreds of small matrices. As one tensor they are one input of a graph, one gradient and one
call of the optimiser; as 448 tensors with moments they cost a minute of compilation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from monograph.ops.adamw import adamw

# By these names transformers' Trainer leaves biases and norms without decay (read in 5.22).
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay pulls to zero, those of transformers' Trainer: all but biases and
    norms. DoRA's magnitudes are among them. What an adapter is called decides nothing: one named `norm` or
    `bias` is decayed as any other."""
    norms = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    written = _without_adapter_names(model)
    return {name for name in written if name not in norms and not _UNDECAYED.search(written[name].lower())}


def _without_adapter_names(model: nn.Module) -> dict[str, str]:
    """The names of parameters, and the same without PEFT's `.default` of `lora_A.default.weight`."""
    adapters = {name for part in model.modules() for name in getattr(part, "peft_config", None) or ()}
    keyed = {
        f"{path}.{adapter}"
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleDict | nn.ParameterDict)
        for adapter in adapters & set(part.keys())
    }
    written = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        kept = [part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in keyed]
        written[name] = ".".join(kept)
    return written


def _full_names(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[list[str]]:
    """For each parameter its names, one for each module object that holds it."""
    found: dict[int, list[str]] = {id(p): [] for p in parameters}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in found:
                found[id(parameter)].append(f"{path}.{name}" if path else name)
    return [found[id(p)] for p in parameters]


def _check_one_device(named: Mapping[str, torch.Tensor]) -> None:
    first = next(iter(named))
    for name, parameter in named.items():
        if parameter.device != named[first].device:
            raise ValueError(
                f"trained parameters are on two devices: {first} on {named[first].device}, {name} on "
                f"{parameter.device}; wanted one, as device_map={{'': device}} or model.to(device) gives"
            )


class FlatParameters:
    """float32 parameters of the model become views of `flat`; a 16-bit parameter keeps its own memory and has
    its float32 master here. `flat`, both moments and `steps` are all that training changes."""

    def __init__(self, model: nn.Module) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("the model has no trainable parameter: add an adapter first")
        # Decayed ones first, so that each group is one slice.
        decayed = decayed_names(model)
        self.names = sorted(named, key=lambda name: name not in decayed)
        self._names = frozenset(self.names)
        self.parameters = [named[name] for name in self.names]
        _check_one_device(named)
        self.sizes = [p.numel() for p in self.parameters]
        self.decayed = sum(p.numel() for name, p in named.items() if name in decayed)
        self.flat = torch.cat([p.detach().float().reshape(-1) for p in self.parameters])
        for parameter, part in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            if parameter.dtype == torch.float32:
                parameter.data = part.view(parameter.shape)
        self._full_names = _full_names(model, self.parameters)
        self.shared_names = {
            name for name, places in zip(self.names, self._full_names, strict=True) if len(places) > 1
        }
        self.exp_avg = torch.zeros_like(self.flat)
        self.exp_avg_sq = torch.zeros_like(self.flat)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.flat.device)

    def check_trained(self, model: nn.Module) -> None:
        """Raises if other parameters of the model are trained now than when this was made: PEFT's
        `set_adapter` freezes those of one adapter and frees another's, which nothing here would update."""
        now = {name for name, p in model.named_parameters() if p.requires_grad}
        for others, what in ((now - self._names, "is trained now"), (self._names - now, "is frozen now")):
            if others:
                raise RuntimeError(
                    f"the trained parameters are not those that the step was made for: {min(others)} {what}; "
                    "make the step anew after set_adapter"
                )

    def views(self, flat: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
        """The parameters by prefixed name, as differentiable parts of `flat`, in their own dtypes."""
        parts = zip(self.names, self.parameters, flat.split(self.sizes), strict=True)
        return {prefix + name: part.view(p.shape).to(p.dtype) for name, p, part in parts}

    def replacements(self, parts: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """For parts of `flat` by name: the parameters at every place that holds them, for a `functional_call`
        that ties nothing.

        torch's own tying puts tensors back by name, and so leaves the replacement in a module that has two
        names: PEFT's `trainable_token_indices` on tied embeddings.
        """
        found: dict[str, torch.Tensor] = {}
        for name, parameter, full_names in zip(self.names, self.parameters, self._full_names, strict=True):
            if name in parts:
                view = parts[name].view(parameter.shape).to(parameter.dtype)
                found |= {prefix + full_name: view for full_name in full_names}
        return found

    def gathered(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of `parameters` as one tensor laid out like `flat`."""
        return torch.cat([g.float().reshape(-1) for g in gradients])

    @torch.no_grad()
    def copy_to_16_bit(self) -> None:
        """Brings parameters that are no views of `flat` up to date."""
        for parameter, part in zip(self.parameters, self.flat.split(self.sizes), strict=True):
            if parameter.dtype != torch.float32:
                parameter.copy_(part.view(parameter.shape))

    def update(
        self,
        gradient: torch.Tensor,
        learning_rate: torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_norm: float,
    ) -> torch.Tensor:
        """One AdamW step on `flat`; gives the gradient's norm before clipping."""
        groups = [self.decayed, self.flat.numel() - self.decayed]
        with torch.no_grad():
            return adamw(
                self.flat.split(groups),
                gradient.split(groups),
                self.exp_avg.split(groups),
                self.exp_avg_sq.split(groups),
                self.steps,
                learning_rate,
                *betas,
                eps,
                [weight_decay, 0.0],
                max_norm,
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Masters, moments and the number of steps, by parameter name: what a resumed run needs."""
        state = {"steps": self.steps.clone()}
        for part in ("flat", "exp_avg", "exp_avg_sq"):
            pieces = zip(self.names, self.parameters, getattr(self, part).split(self.sizes), strict=True)
            state |= {f"{part}.{name}": piece.view(p.shape).clone() for name, p, piece in pieces}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        parts = ("flat", "exp_avg", "exp_avg_sq")
        wanted = {"steps", *(f"{part}.{name}" for part in parts for name in self.names)}
        if set(state) != wanted:
            missing, extra = sorted(wanted - set(state)), sorted(set(state) - wanted)
            raise ValueError(f"optimizer state: missing {missing[:3]}, unexpected {extra[:3]}")
        self.steps.copy_(state["steps"])
        for part in parts:
            for name, piece in zip(self.names, getattr(self, part).split(self.sizes), strict=True):
                piece.copy_(state[f"{part}.{name}"].reshape(-1))
        self.copy_to_16_bit()
