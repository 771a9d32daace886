"""Identity: whether the model is still the one that a step was made for.

A step keeps parameters in a tensor of its own and graphs of the modules as they were. Others replace
parameters, freeze them, hang hooks on modules: each would leave a step that trains what nobody reads. So the
model is walked before every step, in compiled modes too: one pass over its modules, no tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monograph.nn.adapter_state import adapter_layers, constants, untrained_adapters
from monograph.upstream.torch_names import (
    backward_hooks,
    children,
    has_any_global_hook,
    hooks,
    hooks_of_tensor,
    parameters_of,
)

_REBUILD = "step.rebuild() makes the step anew and keeps the moments of what stayed"


class Identity:
    """check() raises RuntimeError with the name of what is another, and what to do.

    compiled: graphs hold the module hooks that were there at the first check. sliced: they compute with
    slices, so that no gradient reaches a parameter itself. unscaled: the loss is not scaled, because nothing
    was float16.
    """

    def __init__(self, model: nn.Module, *, mode: str, compiled: bool, sliced: bool, unscaled: bool) -> None:
        self._model, self._mode, self._compiled, self._sliced = model, mode, compiled, sliced
        self._unscaled = unscaled
        self._named = _trained(model)
        self._hooks: list[tuple[nn.Module, Callable[..., Any]]] | None = None
        self._global_hooks = False
        self._constants: list[tuple[Any, ...]] = []
        self._walk()
        self._places = self._found()

    def _walk(self) -> None:
        self.named_modules = named = list(self._model.named_modules())
        self._modules = [module for _, module in named]
        self._children = self._child_ids()
        self._adapters = adapter_layers(named)
        # Left by `seed_dropouts`: those that drop nothing. A subclass draws as its author wants.
        self._unseeded = [(path, module) for path, module in named if type(module) is nn.Dropout]

    def _child_ids(self) -> list[int]:
        return [id(child) for module in self._modules for child in children(module).values()]

    def _found(self) -> list[int]:
        return [
            id(parameter)
            for module in self._modules
            for parameter in parameters_of(module).values()
            if parameter is not None and parameter.requires_grad
        ]

    def check(self) -> None:
        if self._child_ids() != self._children:
            self._walk()
        if self._found() != self._places:
            self._refuse_trained()
            self._places = self._found()
        for path, dropout in self._unseeded:
            if dropout.p > 0:
                raise RuntimeError(
                    f"{path} drops with p={dropout.p} and draws from torch's generator, wanted the step's "
                    f"seed: it came later, or p was 0, when the step was made; {_REBUILD}"
                )
        if self._unscaled:
            self._check_float16()
        self._check_adapters()
        self._check_parameter_hooks()
        if self._compiled:
            self._check_hooks()

    def _refuse_trained(self) -> None:
        now = _trained(self._model)
        for name, parameter in self._named.items():
            if name in now and now[name] is not parameter:
                self._refuse(
                    f"{name} is another Parameter than it was (load_state_dict(assign=True), "
                    f"load_adapter(low_cpu_mem_usage=True) or a module put in its place do that)"
                )
        frozen = dict(self._model.named_parameters(remove_duplicate=False))
        for name in sorted(now.keys() - self._named.keys()):
            self._refuse(f"{name} is trained now")
        for name in sorted(self._named.keys() - now.keys()):
            self._refuse(f"{name} is {'frozen now' if name in frozen else 'gone'}")

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"the trained parameters are not those that the step was made for: {what}; {_REBUILD}, and "
            "set_adapter goes back to the adapter before"
        )

    def _check_float16(self) -> None:
        for module in self._modules:
            for parameter in parameters_of(module).values():
                if parameter is not None and parameter.dtype is torch.float16:
                    name = next(name for name, p in self._model.named_parameters() if p is parameter)
                    raise RuntimeError(
                        f"{name} is float16 now, and the loss of the step is not scaled, in which small "
                        "gradients vanish; wanted the dtype before, or step.rebuild(), which scales it and "
                        "keeps the moments"
                    )

    def _check_adapters(self) -> None:
        now = [constants(layer) for _, layer in self._adapters]
        if now == self._constants:
            return
        for path, layer in self._adapters:
            for adapter, reason in untrained_adapters(layer):
                raise RuntimeError(f"{path}: adapter {adapter!r} is trained and {reason}")
        self._constants = now

    def _check_parameter_hooks(self) -> None:
        for name, parameter in self._named.items():
            of_gradient, after = hooks_of_tensor(parameter)
            if after:
                raise RuntimeError(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which no mode runs: a step "
                    "accumulates no .grad; remove it"
                )
            if of_gradient and self._sliced:
                raise RuntimeError(
                    f"{name} has a gradient hook (register_hook), which mode {self._mode!r} does not run: "
                    "its gradient is part of one tensor; wanted mode 'eager' or 'inductor', or no hook"
                )

    def _check_hooks(self) -> None:
        now = [(module, hook) for module in self._modules for kind in hooks(module) for hook in kind.values()]
        everywhere = has_any_global_hook()
        if self._hooks is None:
            self._check_backward_hooks()
            self._hooks, self._global_hooks = now, everywhere
            return
        if everywhere != self._global_hooks:
            self._refuse_hook("every module of torch.nn", everywhere)
        known = self._hooks
        if len(now) == len(known) and all(
            module is other and hook is own for (module, hook), (other, own) in zip(now, known, strict=True)
        ):
            return
        for here, there, came in ((now, known, True), (known, now, False)):
            for module, hook in here:
                if not any(module is other and hook is own for other, own in there):
                    self._refuse_hook(self._path_of(module), came)
        self._hooks = now  # the same in another order

    def _check_backward_hooks(self) -> None:
        """A graph holds forward hooks as a part of it. Backward ones torch.compile does not take."""
        for path, module in self.named_modules:
            inside_a_layer = any(part.isdigit() for part in path.split(".")[:-1])
            if backward_hooks(module) and (self._mode != "per_layer" or inside_a_layer):
                raise RuntimeError(
                    f"{path or 'the model'} has a backward hook (register_full_backward_hook), which the "
                    f"graphs of mode {self._mode!r} do not run; wanted mode 'eager', or no hook"
                )

    def _path_of(self, wanted: nn.Module) -> str:
        return next((path for path, m in self._model.named_modules() if m is wanted), "a module that is gone")

    def _refuse_hook(self, where: str, came: bool) -> None:
        what = "has a hook that came" if came else "has lost a hook"
        raise RuntimeError(
            f"{where or 'the model'} {what} after the first step, and the graphs of mode {self._mode!r} do "
            f"not know it; {_REBUILD}, and mode 'eager' takes hooks at any time"
        )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """At every place that holds one."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if parameter.requires_grad}
