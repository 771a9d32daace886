"""RegionLayer: a decoder layer of transformers whose call is one operator.

Its class stays what it was for everybody who asks (isinstance, name, state dict, hooks, checkpointing): only
`__call__` of the instances that `make_regions` took over is another. transformers and accelerate find layers
that are not to be split by the name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from monograph.ops.seeded_dropout import SeededDropout
from monograph.training.regions import registry
from monograph.training.regions.call import described, only_constants, taken_apart
from monograph.training.regions.layer_function import returned_beside
from monograph.training.regions.layer_signature import state_of
from monograph.training.regions.shared_kv import KEYWORD, STORED, read_type, stored_type
from monograph.training.regions.trace import FORWARD, KEEP, RECOMPUTE
from monograph.training.regions.trained import Layout, number_of, one_by_one
from monograph.upstream.instance_class import put_before
from monograph.upstream.torch_names import in_forward_mode
from monograph.upstream.transformers_names import attn_implementation_of

# Numbers for flash attention that change with each batch. Ours does not read them.
_NOT_READ = ("max_length_q", "max_length_k")
# What transformers sets to None in a checkpointed layer.
_CACHES = ("past_key_values", "layer_past")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _autocasts_to(device: str) -> str:
    """The tracer guards the state of autocast."""
    if not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


class RegionLayer(nn.Module):
    """Attributes of a number N, `region_tensors_N` and `region_idle_N`, are of the layout N: a graph reads
    and guards those of the layout that it was traced for, whatever is traced later."""

    region_original: type[nn.Module]
    region_name: str  # its path in the model
    region_word: str  # in the registry
    region_ever: dict[str, None]  # the parameters that were trained at some time
    region_seed: torch.Tensor | None
    region_draws: bool  # whether dropouts want a seed of torch's generator
    region_ignored: tuple[str, ...]  # keywords that its attention does not read
    region_layout: Layout | None  # of `region_given`, while a step lasts
    region_given: list[torch.Tensor] | None
    region_reads: str  # whose keys and values of another layer it reads, and stores: shared_kv.py
    region_stores: str
    region_plain: str  # why it cannot be a region now
    region_refused: str | None  # why it cannot be traced

    def __init_subclass__(cls) -> None:
        if cls.__bases__[0] is RegionLayer:
            cls.region_original = cls.__bases__[1]

    @staticmethod
    def region_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return layer.region_original.forward(layer, *args, **kwargs)

    # Runs while the tracer traces, and at each call without one.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def region_refresh(self) -> str:
        """Brings the tensors of a layout and `region_seed` up to date; gives the number of the layout, or ""
        if the layer cannot be a region now."""
        self.region_seed = None
        dropouts = [m for m in self.modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
        seeds = [m.seed for m in dropouts if isinstance(m, SeededDropout)]
        state = state_of(self)
        if state.hooked is not None:
            self.region_plain = f"{state.hooked} has a hook"
            return ""
        if seeds and len(seeds) < len(dropouts):
            self.region_plain = "some of its dropouts draw from a seed and others from torch's generator"
            return ""
        if in_forward_mode() and any(
            torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in state.tensors.values()
        ):
            self.region_plain = "a tensor of it has a tangent"
            return ""
        self.region_plain = "it is called with a cache or another object that is neither tensor nor constant"
        self.region_reads, self.region_stores = read_type(self), stored_type(self)
        self.region_seed = seeds[0] if seeds else None
        self.region_draws = bool(dropouts) and not seeds
        attentions = {attn_implementation_of(vars(m).get("config")) for m in self.modules()} - {None}
        self.region_ignored = _NOT_READ if attentions == {"monograph"} else ()
        trained = {name: t for name, t in state.tensors.items() if t.requires_grad}
        self.region_ever |= dict.fromkeys(trained)
        idle = [state.tensors[n] for n in self.region_ever if n in state.tensors and n not in trained]
        number = number_of(self.region_layout or one_by_one(trained))
        vars(self)[f"region_tensors_{number}"] = list(trained.values())
        vars(self)[f"region_idle_{number}"] = [] if self.region_layout else idle
        return number

    # Runs as `region_refresh` does.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def region_refuse(self) -> None:
        """A step differentiates by `region_given`, which the layer's own code does not read."""
        self.region_refused = self.region_plain
        raise RuntimeError(f"region {self.region_word} cannot be one now: {self.region_plain}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trained = self.region_refresh()
        grad = torch.is_grad_enabled()
        given = {name: value for name, value in kwargs.items() if name not in self.region_ignored}
        checkpointed = self.training and getattr(self, "gradient_checkpointing", False)
        if checkpointed:
            if "use_cache" in given:
                given["use_cache"] = False
            for name in _CACHES:
                if name in given:
                    given[name] = None
        first = (given.pop("hidden_states"), *args) if "hidden_states" in given else args
        shared = given.get(KEYWORD)
        if shared is not None:
            given[KEYWORD] = {self.region_reads: shared[self.region_reads]} if self.region_reads else {}
        tensors: list[torch.Tensor] = []
        structure = taken_apart((first, given), tensors, grad)
        # A cache or a hook: the layer computes it as ever.
        if not (trained and only_constants(structure) and isinstance(first[0], torch.Tensor)):
            if self.region_given is not None:
                self.region_refuse()
            return super().__call__(*args, **kwargs)
        # Read, so that a graph is not taken for a layer of which more is trained.
        any([t.requires_grad for t in getattr(self, f"region_idle_{trained}")])
        parameters = self.region_given
        if parameters is None:
            parameters = getattr(self, f"region_tensors_{trained}")
        mode = (RECOMPUTE if checkpointed else KEEP) if grad else FORWARD
        seed = self.region_seed
        if seed is not None:
            seed = seed.clone()  # it is filled anew before the next forward, maybe before this backward
        elif self.region_draws:
            seed = torch.randint(2**62, (), dtype=torch.int64)
        hidden, *inputs = tensors
        call, autocast = described(structure), _autocasts_to(hidden.device.type)
        results = torch.ops.monograph.region(
            self.region_word, call, trained, mode, autocast, hidden, seed, inputs, parameters
        )
        returned = 2 + returned_beside(self)
        if returned > 2:
            self.give_beside(results[2:returned])  # type: ignore[operator]
        if self.region_stores:
            shared[self.region_stores] = tuple(results[returned : returned + STORED])  # type: ignore[index]
        return results[0]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy is a layer of its own
        self.region_word = registry.enter(self.region_name, self)


def take_over(layer: Any, name: str) -> None:
    layer.region_name, layer.region_plain, layer.region_refused = name, "", None
    layer.region_layout, layer.region_given, layer.region_seed = None, None, None
    layer.region_draws, layer.region_ignored = False, ()
    layer.region_reads, layer.region_stores = "", ""
    layer.region_ever = {name: None for name, p in layer.named_parameters() if p.requires_grad}
    put_before(RegionLayer, layer)
    layer.region_word = registry.enter(name, layer)


def give_back(layer: Any) -> None:
    if type(layer).__bases__[0] is not RegionLayer:
        raise ValueError(
            f"regions: {layer.region_name} is a {type(layer).__name__} by now, wanted the region itself: "
            "undo regions before fully_shard"
        )
    layer.__class__ = layer.region_original
    for name in [name for name in vars(layer) if name.startswith("region_")]:
        del vars(layer)[name]
