"""All trainable parameters of a model behind each other in one float32 tensor, and AdamW over it.

An adapter has hundreds of small matrices. As one tensor they are one input of a graph, one gradient and one
call of the optimiser; as 448 tensors with moments they cost a minute of compilation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from monograph.distributed.expert_adapter import factor_cuts
from monograph.distributed.expert_group import ExpertGroup
from monograph.distributed.expert_norm import SpreadNorm
from monograph.ops.adamw import adamw
from monograph.ops.spread_norm import register_norm
from monograph.training.own_counts import OwnCounts
from monograph.training.state_parts import StatePart, made, part_of

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
    its float32 master here. `flat`, both moments and `steps` are all that training changes.

    before: of the same model, which has changed since. What has its name and shape keeps its moments; what is
    new begins with zero ones and a count of its own.

    Of factors that are cut with their experts (`cuts`, by name) each rank has its share here. State
    dictionaries are whole: the first rank gathers them, and each takes its share of one that is loaded.
    """

    def __init__(self, model: nn.Module, before: FlatParameters | None = None) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("the model has no trainable parameter: add an adapter first")
        # Decayed ones first, so that each group is one slice.
        decayed = decayed_names(model)
        self.names = sorted(named, key=lambda name: name not in decayed)
        self.parameters = [named[name] for name in self.names]
        _check_one_device(named)
        self.sizes = [p.numel() for p in self.parameters]
        self.decayed = sum(p.numel() for name, p in named.items() if name in decayed)
        self._kinds = [(p.dtype, p.shape) for p in self.parameters]
        self.flat = torch.cat([p.detach().float().reshape(-1) for p in self.parameters])
        self._point()
        self._full_names = _full_names(model, self.parameters)
        self.shared_names = {
            name for name, places in zip(self.names, self._full_names, strict=True) if len(places) > 1
        }
        self.exp_avg = torch.zeros_like(self.flat)
        self.exp_avg_sq = torch.zeros_like(self.flat)
        self.steps = torch.zeros((), dtype=torch.float32, device=self.flat.device)
        self.counts = OwnCounts(self.sizes, self.decayed)
        self.cuts = factor_cuts(model)
        self._norm, self._norm_number = None, 0
        if self.cuts:
            self._norm = SpreadNorm(
                self.sizes, [p.shape for p in self.parameters], [self.cuts.get(n) for n in self.names]
            )
            self._norm_number = register_norm(self._norm)
        if before is not None:
            self._keep(before)

    def _point(self) -> None:
        """Makes the float32 parameters views of `flat`."""
        self._placed: list[tuple[int, torch.Tensor, int, torch.Size]] = []  # number, where it lies in bytes
        begin = 0
        for number, (parameter, size) in enumerate(zip(self.parameters, self.sizes, strict=True)):
            if parameter.dtype == torch.float32:
                parameter.data = self.flat[begin : begin + size].view(parameter.shape)
                if size:
                    self._placed.append((number, parameter, 4 * begin, parameter.shape))
            begin += size

    def _keep(self, before: FlatParameters) -> None:
        self.steps.copy_(before.steps)
        old = {
            name: (kind[1], *parts, count)
            for name, kind, *parts, count in zip(
                before.names,
                before._kinds,
                before.exp_avg.split(before.sizes),
                before.exp_avg_sq.split(before.sizes),
                before.counts.joined or [0.0] * len(before.names),
                strict=True,
            )
        }
        now = float(before.steps)
        joined = []
        ours = zip(self.exp_avg.split(self.sizes), self.exp_avg_sq.split(self.sizes), strict=True)
        for name, (_, shape), (exp_avg, exp_avg_sq) in zip(self.names, self._kinds, ours, strict=True):
            found = old.get(name)
            if found is None or found[0] != shape:
                joined.append(now)
                continue
            exp_avg.copy_(found[1])
            exp_avg_sq.copy_(found[2])
            joined.append(found[3])
        self.counts.set(joined, self.steps)

    def take_changed(self) -> bool:
        """Takes what others have put into the parameters since: memory of their own (`p.data = ...`), or
        values in a 16-bit one. Moments stay. Writes to no memory that somebody may hold: `flat` is another
        tensor then. True if there was any."""
        base = self.flat.data_ptr()
        changed = [
            number
            for number, p, offset, shape in self._placed
            if p.data_ptr() != base + offset or p.shape != shape or not p.is_contiguous()
        ]
        if len(self._placed) < len(self.parameters):
            changed += self._written()
        if not changed:
            return False
        for number in changed:
            p, kind = self.parameters[number], self._kinds[number]
            if (p.dtype, p.shape) != kind or p.device != self.flat.device:
                raise RuntimeError(
                    f"{self.names[number]} is {p.dtype} {list(p.shape)} on {p.device} now, the step was made "
                    f"for {kind[0]} {list(kind[1])} on {self.flat.device}; wanted it back, or step.rebuild()"
                )
        parts = list(self.flat.split(self.sizes))
        for number in changed:
            parts[number] = self.parameters[number].detach().float().reshape(-1)
        self.flat = torch.cat(parts)
        self._point()
        return True

    def _written(self) -> list[int]:
        """Those beside `flat` that are no longer their rounded masters. Values are compared: a version counts
        no write through `.data`."""
        other = [n for n, kind in enumerate(self._kinds) if kind[0] != torch.float32 and self.sizes[n]]
        for number in other:
            if self.parameters[number].dtype != self._kinds[number][0]:
                return [number]
        parts = self.flat.split(self.sizes)
        # All at once: asking for each would wait for a device each time.
        for dtype in {self._kinds[number][0] for number in other}:
            own = [number for number in other if self._kinds[number][0] == dtype]
            now = torch.cat([self.parameters[number].detach().reshape(-1) for number in own])
            if torch.equal(now, torch.cat([parts[number] for number in own]).to(dtype)):
                other = [number for number in other if number not in own]
        return [
            n
            for n in other
            if not torch.equal(self.parameters[n].reshape(-1), parts[n].to(self._kinds[n][0]))
        ]

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

    @property
    def spread_norm(self) -> SpreadNorm | None:
        """What makes the norm where factors are cut."""
        return self._norm

    @property
    def owners(self) -> ExpertGroup | None:
        """The ranks over which factors are cut; None if they are not."""
        return None if self._norm is None else self._norm.group

    def shared(self, flat: torch.Tensor) -> torch.Tensor:
        """What every rank has alike, of a tensor that is laid out like `flat`."""
        return flat if not self.cuts else torch.cat([flat[:0], *self._parts(flat, cut=False)])

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """The rest: shares of factors."""
        return torch.cat([flat[:0], *(self._parts(flat, cut=True) if self.cuts else [])])

    def _parts(self, flat: torch.Tensor, *, cut: bool) -> list[torch.Tensor]:
        both = zip(self.names, flat.split(self.sizes), strict=True)
        return [part for name, part in both if (name in self.cuts) == cut]

    def put_together(self, shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Laid out like `flat`: what `shared` and `own` take apart."""
        cut = [name in self.cuts for name in self.names]
        sizes = list(zip(self.sizes, cut, strict=True))
        parts = [
            iter(t.split([size for size, one in sizes if one == which]))
            for t, which in ((shared, False), (own, True))
        ]
        return torch.cat([next(parts[one]) for one in cut])

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
        groups = self.counts.groups
        with torch.no_grad():
            spread = None
            if self.cuts:
                spread, gradient = self._clipped(gradient, max_norm)
                max_norm = 0.0
            norm = adamw(
                self.flat.split(groups),
                gradient.split(groups),
                self.exp_avg.split(groups),
                self.exp_avg_sq.split(groups),
                self.steps if self.counts.steps is None else self.counts.steps,
                learning_rate,
                *betas,
                eps,
                [weight_decay if decayed else 0.0 for decayed in self.counts.decayed],
                max_norm,
            )
            self.counts.tell(self.steps)
            return norm if spread is None else spread

    def _clipped(self, gradient: torch.Tensor, max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm over all ranks, and what `adamw` multiplies the gradient with done already. Where the norm
        is not finite every rank has one that is not."""
        norm = torch.ops.monograph.spread_norm(
            gradient, list(accumulate(self.counts.groups)), self._norm_number
        )
        clip = torch.ones_like(norm)
        if max_norm > 0:
            clip = torch.where(norm.double() > max_norm, (max_norm / norm.double()).float(), clip)
        return norm, gradient * torch.where(norm.isfinite(), clip, torch.nan)

    def state_parts(self) -> list[StatePart]:
        """Masters, moments and the number of steps, by parameter name: what a resumed run needs. Where
        factors are cut, making one is a collective, and only rank 0 gets it."""
        parts = [part_of("steps", self.steps)]
        for part in ("flat", "exp_avg", "exp_avg_sq"):
            pieces = zip(
                self._whole_shapes(), self.parameters, getattr(self, part).split(self.sizes), strict=True
            )
            for (name, shape), p, piece in pieces:
                make = partial(self._whole, name, piece.view(p.shape))
                parts.append(StatePart(f"{part}.{name}", piece.dtype, shape, make))
        joined = zip(self.names, self.counts.joined, strict=False)
        return parts + [part_of(f"joined.{name}", self.steps.new_tensor(c)) for name, c in joined if c]

    def _whole(self, name: str, piece: torch.Tensor) -> torch.Tensor | None:
        cut = self.cuts.get(name)
        if cut is None:
            return piece.clone()
        return cut.gathered(piece) if cut.group.place == 0 else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parts at once."""
        return made(self.state_parts())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        parts = ("flat", "exp_avg", "exp_avg_sq")
        wanted = {f"{part}.{name}": shape for part in parts for name, shape in self._whole_shapes()}
        wanted["steps"] = torch.Size(())
        late = {f"joined.{name}": torch.Size(()) for name in self.names}
        missing, extra = (
            sorted(wanted.keys() - state.keys()),
            sorted(state.keys() - wanted.keys() - late.keys()),
        )
        if missing or extra:
            raise ValueError(f"optimizer state: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, value in state.items():  # all of them before the first is taken
            shape = wanted.get(name, late.get(name))
            if not isinstance(value, torch.Tensor) or value.shape != shape or not value.is_floating_point():
                found = (
                    f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
                )
                raise ValueError(f"optimizer state: {name} is {found}, wanted float32 {list(shape or ())}")
        self.steps.copy_(state["steps"])
        for part in parts:
            for name, piece in zip(self.names, getattr(self, part).split(self.sizes), strict=True):
                value, cut = state[f"{part}.{name}"], self.cuts.get(name)
                piece.copy_((value if cut is None else cut.share(value)).reshape(-1))
        self.counts.set([float(state.get(f"joined.{name}", 0.0)) for name in self.names], self.steps)
        self.copy_to_16_bit()

    def _whole_shapes(self) -> list[tuple[str, torch.Size]]:
        return [
            (name, self.cuts[name].whole_shape(shape) if name in self.cuts else shape)
            for name, (_, shape) in zip(self.names, self._kinds, strict=True)
        ]
