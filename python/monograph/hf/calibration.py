"""calibrate: calibration.safetensors beside an adapter, from inputs that the layers of a model really have.

    mg.calibrate(model, batches, "outputs/out")      # monograph merge --rounding calibrated reads it

For each linear layer MODULE, named as in the checkpoint: `MODULE.sketch` float32 [k, inputs], k <= 64, with
sketch^T sketch near the mean of x x^T over tokens, and `MODULE.diagonal` float32 [inputs], the mean of x^2.
Of experts that lie in one parameter, MODULE is its name as an adapter has it (`...experts.down_proj`), and
the mean is that over all experts and the tokens routed to them.

Forwards run in eager mode without gradients, with the adapter as it is and without dropout. A hook reads what
a layer is given; what experts have between their two products comes from the operator. The head is not run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from monograph.distributed.expert_parallel import expert_group_of
from monograph.distributed.replica_check import check_same_values
from monograph.distributed.shard import shard_group_of
from monograph.hf.transformers.experts import experts_kind, is_experts
from monograph.nn.packed_experts import ExpertsKind, PackedExperts
from monograph.ops.experts_activation import activate
from monograph.ops.experts_arguments import ExpertsArguments
from monograph.training.evaluating import evaluating
from monograph.training.input_sketch import InputSketch, Moments, moments
from monograph.training.loss import NOT_FOR_THE_BODY, causal_parts
from monograph.upstream.torch_names import TorchDispatchMode, parameters_of, version_of

FILE = "calibration.safetensors"
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def _innermost(module: Any) -> Any:
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.base_layer
    return module


def _outermost(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Layers that are wanted, each under all its names: the name in the checkpoint, the module around it, the
    layer itself. A hook on the inner one would keep the fused forward of the outer one from running."""
    inside = "\0"
    for path, module in model.named_modules(remove_duplicate=False):
        layer = _innermost(module)
        if not f"{path}.".startswith(inside) and wanted(layer):
            inside = f"{path}."
            yield _WRAPPERS.sub("", path), module, layer


def _is_experts(layer: nn.Module) -> bool:
    return isinstance(layer, PackedExperts) or is_experts(layer)


def _weight_of(layer: nn.Module) -> int:
    """The same number for layers with one weight."""
    stored = parameters_of(layer)
    return id(stored.get("values", stored.get("weight")))


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Sketches of what layers are given, by the number of their weight, while a model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, dict[str, None]] = {}
        self.real: torch.Tensor | None = None  # of the tokens of this batch: false for padding
        self._sketches: dict[int | str, InputSketch] = {}
        self._running: tuple[str, ExpertsKind] | None = None  # experts that have not computed yet
        self._last: tuple[torch.Tensor, int, Moments] | None = None

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        hooked: set[nn.Module] = set()
        with ExitStack() as stack:
            for name, module, layer in _outermost(model, lambda layer: isinstance(layer, nn.Linear)):
                self.names.setdefault(_weight_of(layer), {})[name] = None
                if module not in hooked:
                    hook = self._linear(_weight_of(layer))
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
                    hooked.add(module)
            experts = list(_outermost(model, _is_experts))
            for name, module, layer in experts:
                kind = layer.experts_kind if isinstance(layer, PackedExperts) else experts_kind(layer)
                enter, leave = self._around_experts(name, kind)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            if experts:
                stack.enter_context(self)
            yield

    def _linear(self, weight: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.see(weight, args[0] if args else next(iter(kwargs.values())))

        return hook

    def _around_experts(
        self, name: str, kind: ExpertsKind
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: Any) -> None:
            self._running = (name, kind)

        def leave(*_: Any) -> None:
            if self._running is not None:
                raise ValueError(
                    f"calibrate: {name} does not compute with monograph::experts; wanted "
                    'model.set_experts_implementation("monograph") before'
                )

        return enter, leave

    def see(self, weight: int, x: torch.Tensor) -> None:
        """Inputs of a layer, [..., inputs]. Those that several layers share (q, k, v) are multiplied once."""
        if self._last is None or self._last[0] is not x or self._last[1] != version_of(x):
            rows = x.reshape(-1, x.shape[-1])
            if self.real is not None and self.real.numel() == rows.shape[0]:
                rows = rows[self.real.to(rows.device)]
            self._last = (x, version_of(x), moments(rows))
        self._add(weight, self._last[2])

    def _add(self, key: int | str, seen: Moments) -> None:
        self._sketches.setdefault(key, InputSketch(seen.squares.numel())).add(seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.monograph.experts.default or self._running is None:
            return func(*args, **(kwargs or {}))
        (name, kind), self._running = self._running, None
        *given, _ = args
        y, pre = func(*given, True)
        self._see_experts(name, kind, ExpertsArguments(*given), pre)
        return y, pre

    def _see_experts(self, name: str, kind: ExpertsKind, given: ExpertsArguments, pre: torch.Tensor) -> None:
        ids, experts = given.ids, given.shapes("experts")[0][0]
        routed = (ids >= 0) & (ids < experts)
        order = torch.sort(torch.where(routed, ids, experts).reshape(-1), stable=True).indices
        counted = routed
        if self.real is not None and self.real.numel() == ids.shape[0]:
            counted = routed & self.real.to(ids.device)[:, None]
        slots = counted.sum(1)
        total = int(slots.sum())
        first, second = (f"{name}.{parameter}" for parameter in kind.names)
        self._add(first, moments(given.x.float() * slots.float().sqrt()[:, None], total))
        # Rows of `pre` are slots by expert, in the order of tokens; those that no expert has come last.
        self._add(second, moments(activate(pre[counted.reshape(-1)[order]], kind), total))

    def result(self) -> dict[str, InputSketch]:
        """By name. Layers of one weight have the same."""
        found: dict[str, InputSketch] = {}
        for key, sketch in self._sketches.items():
            names = self.names[key] if isinstance(key, int) else [key]
            found |= dict.fromkeys(names, sketch)
        return found


def _real_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Which tokens of a batch are no padding; None if it has none."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"calibrate: a batch is of type {type(batch).__name__}, wanted a mapping with input_ids"
        )
    if batch.get("cu_seqlens") is not None:
        return torch.arange(batch["input_ids"].numel()) < int(batch["cu_seqlens"][-1])
    mask = batch.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = (
            f"shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"type {type(mask).__name__}"
        )
        raise ValueError(f"calibrate: attention_mask has {found}, wanted [rows, tokens]: it tells padding")
    return mask.reshape(-1).bool()


@torch.no_grad()
def input_sketches(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, InputSketch]:
    """A sketch of the inputs of each linear layer that these batches reach, by its name in the checkpoint."""
    causal, body, head = causal_parts(model, "calibrate")
    if (spread := expert_group_of(model)) is not None:
        raise ValueError(
            f"calibrate: the experts are spread over {spread.size} ranks, where what they are given is not "
            "seen; wanted the adapter on a whole model, on one process"
        )
    path = next(path for path, module in causal.named_modules() if module is head)
    watch, group = _Watch(), shard_group_of(model)
    device = next(causal.parameters()).device
    with evaluating(model), watch.on(causal):
        weight = next((key for key, names in watch.names.items() if path in names), None)
        for batch in batches:
            watch.real = _real_tokens(batch)
            if group is not None:
                wanted = "the same batches on all ranks that share a base"
                check_same_values("calibrate: the input_ids", batch["input_ids"], wanted, group)
            inputs = {
                key: value.to(device) if isinstance(value, torch.Tensor) else value
                for key, value in batch.items()
                if key not in NOT_FOR_THE_BODY
            }
            hidden = body(**inputs, use_cache=False).last_hidden_state
            if weight is not None:
                watch.see(weight, hidden)
    found = watch.result()
    if not found:
        raise ValueError("calibrate: no batch reached a linear layer, wanted at least one batch")
    return found


def save_sketches(
    sketches: dict[str, InputSketch], folder: str | os.PathLike[str], base_sha256: str | None = None
) -> str:
    """Writes calibration.safetensors, complete or not at all; `sketches` is empty afterwards."""
    tokens = max(sketch.tokens for sketch in sketches.values())
    tensors: dict[str, torch.Tensor] = {}
    for name in list(sketches):  # in the order of the model: an error names the first
        try:
            rows, diagonal = sketches.pop(name).result()
        except ValueError as error:
            raise ValueError(f"calibrate: {name}: {error}") from error
        tensors |= {f"{name}.sketch": rows, f"{name}.diagonal": diagonal}
    metadata = {"monograph.calibration": "1", "monograph.tokens": str(tokens)}
    if base_sha256:
        metadata["monograph.base_sha256"] = base_sha256
    path = os.path.join(folder, FILE)
    _write(f"{path}.new", tensors, metadata)
    os.replace(f"{path}.new", path)
    return path


def _write(path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of float32 tensors. That library's own `save_file` writes metadata in an order that
    changes from run to run."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + 4 * tensors[name].numel()
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(tensors[name].contiguous().numpy().astype("<f4", copy=False).data)


def calibrate(model: nn.Module, batches: Iterable[Mapping[str, Any]], folder: str | os.PathLike[str]) -> str:
    """Runs a model on a few batches and writes calibration.safetensors into the folder of its adapter, for
    `monograph merge --rounding calibrated`; gives its path. Sixteen sequences are enough.

    A batch is what the model is called with: `input_ids`, and `attention_mask` or the boundaries of packed
    documents if there is padding, which is left out. The adapter is on as it is. With a sharded base all
    ranks call it with the same batches, and rank 0 writes; else call it on one rank.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(f"calibrate: {os.fspath(folder)} is a file, wanted a folder")
    base_sha256 = _base_sha256(folder)
    sketches = input_sketches(model, batches)
    if shard_group_of(model) is None or torch.distributed.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        save_sketches(sketches, folder, base_sha256)
    return os.path.join(folder, FILE)


def _base_sha256(folder: str | os.PathLike[str]) -> str | None:
    """As monograph.json beside the adapter has it."""
    path = os.path.join(folder, "monograph.json")
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        record = json.load(file)
    base = record.get("base", {}) if isinstance(record, dict) else record
    if not isinstance(base, dict):
        raise ValueError(f"{path}: found {base!r:.40}, wanted a mapping with one called base in it")
    found = base.get("sha256")
    return found if isinstance(found, str) else None
