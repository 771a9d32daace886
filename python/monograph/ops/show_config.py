"""What this installation is and what it picked on this machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

import torch

from monograph.ops import library, providers
from monograph.ops.formats import FORMATS, GROUP_CODES

# By the numbers of `Isa` in C++, which has a range for each architecture.
ISA_NAMES = {0: "scalar", 1: "avx2", 2: "avx512", 3: "avx512_bf16", 4: "amx", 32: "neon"}
# What the next set with kernels of its own would bring, of those that the machine may have.
_BETTER = {
    "scalar": "avx2 (AVX2, FMA, F16C and BMI2) computes eight numbers at a time",
    "avx2": "avx512 (F, BW, DQ and VL) computes sixteen numbers at a time, not eight",
    "avx512": "avx512_bf16 (Zen 4, Cooper Lake) multiplies pairs of bf16 numbers, amx matrices on tiles",
    "avx512_bf16": "amx multiplies bf16 matrices on tiles",
}
_BETTER_ON_ARM = {"scalar": "neon, which every 64-bit Arm has, computes four numbers at a time"}
_PEERS = (
    "bitsandbytes",
    "transformers",
    "peft",
    "torchao",
    "trl",
    "safetensors",
    *(distribution for _, distribution in providers.LIBRARIES.values()),
)


def chosen_isa() -> str:
    """The instruction set the CPU kernels use: the machine's best, capped by MONOGRAPH_ISA."""
    return ISA_NAMES[torch.ops.monograph.system_info()[0]]


def kernels_in_use() -> str:
    """The instruction set that runs, why not the machine's best, and what a better one would bring."""
    chosen, machine = (ISA_NAMES[i] for i in torch.ops.monograph.system_info())
    capped = "" if chosen == machine else f" (capped by MONOGRAPH_ISA; the machine has {machine})"
    better = _BETTER_ON_ARM if machine == "neon" else _BETTER
    return f"{chosen}{capped}" + (f"; better: {better[chosen]}" if chosen in better else "")


def config() -> dict[str, str]:
    """What `show_config` prints, as a dictionary."""
    entries = {
        "monograph": importlib.metadata.version("monograph"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "library": library.NAME,
        "isa": kernels_in_use(),
        "threads": str(torch.get_num_threads()),
        "formats": ", ".join([*FORMATS, *GROUP_CODES]),
        "providers cpu": providers.summary("cpu"),
    }
    if torch.version.cuda or torch.version.hip:
        entries["providers cuda"] = providers.summary("cuda")
    for name in _PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            entries[name] = importlib.metadata.version(name)
    return entries


def show_config() -> None:
    """Prints versions, the instruction set in use and the features of this build."""
    for name, value in config().items():
        print(f"{name:14} {value}")
