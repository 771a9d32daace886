"""`torch_compile_options`, ten options of Inductor, and `torch_compile_mode`, a set of them.

Checked when read, applied for one run only.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from monograph.recipe.config.check_value import wanted

Value = bool | int | float | str

# What each does on a CPU, read in torch 2.13; docs/reference/keys.md quotes it. None: it has an effect.
OPTIONS: dict[str, str | None] = {
    "assume_aligned_inputs": "it changes Triton kernels only",
    "comprehensive_padding": "Inductor turns it off for graphs without a GPU",
    "coordinate_descent_check_all_directions": "it changes Triton kernels only",
    "coordinate_descent_tuning": "it changes Triton kernels only",
    "decompose_mem_bound_mm": "it changes products with one row only",
    "epilogue_fusion": None,
    "fx_graph_cache": None,
    "max_autotune_gemm": None,
    "shape_padding": "it pads products on GPUs only",
    "triton.cudagraphs": "CUDA graphs need a GPU",
}


# Modes that are nothing but CUDA graphs.
_CUDA_GRAPHS = ("reduce-overhead",)


def check_compile_options(
    options: Mapping[str, Any] | None,
    *,
    torch_compile: bool | str | None,
    packing: bool,
    device: str = "cpu",
    mode: str | None = None,
) -> tuple[list[str], list[str]]:
    """Errors and notices about options and mode on a kind of device; both empty without them."""
    errors, notices = [], []
    compiles = "missing" if torch_compile is None else "false"
    if options and not torch_compile:
        errors.append(
            f"torch_compile_options: torch_compile is {compiles}, so they would do nothing; "
            "write torch_compile: true (or auto) beside them"
        )
    if mode and not torch_compile:
        errors.append(
            f"torch_compile_mode: torch_compile is {compiles}, so it would do nothing; "
            "write torch_compile: true (or auto) beside it"
        )
    if device != "cuda" and mode in _CUDA_GRAPHS:
        errors.append(
            f"torch_compile_mode: {mode} means CUDA graphs, and the device is {device}; leave it out, or "
            "write device: cuda"
        )
    for name, value in (options or {}).items():
        if name not in OPTIONS:
            near = difflib.get_close_matches(str(name), OPTIONS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            errors.append(
                f"torch_compile_options: {name!r} is not allowed; {hint}allowed are {', '.join(OPTIONS)}"
            )
            continue
        kind = _kind(name)
        if not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            errors.append(f"torch_compile_options: {name} is {value!r}, wanted {wanted(kind)}")
        elif device == "cpu" and OPTIONS[name] is not None and value:
            notices.append(
                f"torch_compile_options: {name} has no effect on this device (cpu): {OPTIONS[name]}"
            )
    if device != "cuda" and device != "cpu" and (options or {}).get("triton.cudagraphs") is True:
        errors.append(
            f"torch_compile_options: triton.cudagraphs is true, and the device is {device}; leave it out"
        )
    if packing and (asks := _asks_for_cuda_graphs(options, mode)):
        notices.append(
            f"{asks}: triton.cudagraphs with sample_packing: a CUDA graph replays fixed "
            "addresses, and each packing makes new boundaries; expect re-recording, or leave one out"
        )
    return errors, notices


def _asks_for_cuda_graphs(options: Mapping[str, Any] | None, mode: str | None) -> str | None:
    """The key that does, as a recipe has it; None for none."""
    said = {**mode_options(mode), **(options or {})}
    if said.get("triton.cudagraphs") is not True:
        return None
    return (
        "torch_compile_options" if "triton.cudagraphs" in (options or {}) else f"torch_compile_mode: {mode}"
    )


def waits_in_cuda_graphs(
    options: Mapping[str, Any] | None, mode: str | None, device: str, asked: Mapping[str, str] | None
) -> list[str]:
    """Notices about those who compute on the card that is here and wait for it. asked: the key `providers`,
    without an error in it."""
    if device != "cuda" or not (asks := _asks_for_cuda_graphs(options, mode)):
        return []
    import torch

    from monograph.ops import providers

    if not torch.cuda.is_available():
        return []
    with providers.using(asked):
        found = providers.notes(torch.device(device))
    return [
        f"{asks}: triton.cudagraphs, and {note}, for which no CUDA graph can wait; leave it out, or write "
        "torch_compile_mode: max-autotune-no-cudagraphs, if the model has such layers"
        for note in found
    ]


def _owner(name: str) -> tuple[Any, str]:
    """The module that holds a dotted option, and its last name there."""
    from monograph.upstream.torch_names import inductor_config as owner

    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, last)  # AttributeError if torch has renamed it
    return owner, last


def _kind(name: str) -> type[Value]:
    """The type that Inductor's own configuration has for an option."""
    owner, last = _owner(name)
    return type(getattr(owner, last))


def mode_options(mode: str | None) -> dict[str, Value]:
    """What torch.compile's `mode` sets."""
    if mode is None:
        return {}
    from monograph.upstream.torch_names import list_mode_options

    return list_mode_options(mode)


def option_default(name: str) -> Any:
    """Inductor's value of an option, now."""
    owner, last = _owner(name)
    return getattr(owner, last)


@contextlib.contextmanager
def compile_options(options: Mapping[str, Value] | None, mode: str | None = None) -> Iterator[None]:
    """Sets mode and options in Inductor's configuration; whatever happens, puts back what was there."""
    before = []
    try:
        for name, value in (mode_options(mode) | dict(options or {})).items():
            owner, last = _owner(name)
            before.append((owner, last, getattr(owner, last)))
            setattr(owner, last, value)
        yield
    finally:
        for owner, last, value in reversed(before):
            setattr(owner, last, value)
