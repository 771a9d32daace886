"""ShardPlaceholder: what stands in the place of a parameter whose bytes are sharded across ranks.

It has the name, dtype, device and shape of the parameter, but the last dimension is 0: it has no elements. It
can be looked at, listed, copied with its model and moved to where it is; to compute with it is an error that
names it, also for who goes over its rows piece by piece (a head in tiles).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from monograph.upstream.torch_names import LOOKS, disable_torch_function, make_subclass, tree_leaves

# Whoever lists, counts or guards parameters calls these; none of them reads an element. Not `data_ptr`:
# safetensors would write a tensor without elements.
_LOOKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_shared", "is_pinned"),
    *("untyped_storage", "get_device", "share_memory_", "is_same_size", "__len__", "__format__"),
    *LOOKS,
}
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that are tensors to compute with
_MOVES = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous", "pin_memory"}


class ShardPlaceholder(nn.Parameter):
    """See the module's first lines."""

    place: str  # its name in the model
    ranks: int

    @staticmethod
    def __new__(cls, like: torch.Tensor, place: str, ranks: int) -> ShardPlaceholder:
        with disable_torch_function():  # one that is away already is copied
            empty = torch.empty((*like.shape[:-1], 0), dtype=like.dtype, device=like.device)
        made = make_subclass(cls, empty, False)
        made.place, made.ranks = place, ranks
        return made

    def __init__(self, like: torch.Tensor, place: str, ranks: int) -> None:
        pass

    def refuse(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"{how}: {self.place} is sharded over {self.ranks} ranks, and each holds a part of its bytes; "
            "wanted monograph.unsharded(model) around what reads whole tensors"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = next((a for a in args if isinstance(a, ShardPlaceholder)), None)
        if own is None:  # inside a list of tensors, or by name
            own = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, cls))
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        with disable_torch_function():
            if name in _LOOKS or (name == "__get__" and attribute not in _VALUES):
                return func(*args, **kwargs)
            if name == "detach":
                return type(own)(own, own.place, own.ranks)
            if name == "requires_grad_" and False in (*args[1:], *kwargs.values()):
                return own
            if name == "__set__" and attribute == "requires_grad" and args[1] is False:
                return None
            if name == "__set__" and attribute == "grad" and args[1] is None:
                return None
            if name == "__set__" and attribute == "data" and args[1] is own:
                return None
            if name == "copy_" and args[0] is args[1]:  # load_state_dict of a model that stays sharded
                return own
            if name in _MOVES:
                moved = func(*args, **kwargs)
                if isinstance(moved, str):
                    return moved
                if (moved.dtype, moved.device) == (own.dtype, own.device):
                    return own
        own.refuse(f"{attribute}.{name}" if attribute else name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardPlaceholder:
        memo[id(self)] = made = type(self)(self, self.place, self.ranks)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse("pickle or torch.save")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.place}, {self.dtype}, ranks={self.ranks})"


class ExpertPlaceholder(ShardPlaceholder):
    """The same for the tensors of experts: what this rank has of them are those of its own experts."""

    def refuse(self, how: str) -> NoReturn:
        raise RuntimeError(
            f"{how}: the experts of {self.place} are spread over {self.ranks} ranks (expert_parallel), and "
            "each has its own alone; wanted the model as it was loaded: the adapter's folder and that of the "
            "base have all of it"
        )
