"""What this installation is and what it picked on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch

from monograph.ops import library
from monograph.ops.formats import FORMATS, GROUP_CODES

# By the numbers of `Isa` in C++, which has a range for each architecture.
ISA_NAMES = {0: "scalar", 1: "avx2", 2: "avx512", 3: "avx512_bf16", 4: "amx"}
_PEERS = ("bitsandbytes", "transformers", "peft", "torchao", "trl", "safetensors")


def chosen_isa() -> str:
    """The instruction set the CPU kernels use: the machine's best, capped by MONOGRAPH_ISA."""
    return ISA_NAMES[torch.ops.monograph.system_info()[0]]


def config() -> dict[str, str]:
    """What `show_config` prints, as a dictionary."""
    chosen, machine = (ISA_NAMES[i] for i in torch.ops.monograph.system_info())
    entries = {
        "monograph": importlib.metadata.version("monograph"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "library": library.NAME,
        "isa": chosen if chosen == machine else f"{chosen} (capped; the machine has {machine})",
        "threads": str(torch.get_num_threads()),
        "formats": ", ".join([*FORMATS, *GROUP_CODES]),
        "devices": "cpu by C++ kernels; any other by the portable implementation",
    }
    for name in _PEERS:
        if importlib.util.find_spec(name) is not None:
            entries[name] = importlib.metadata.version(name)
    return entries


def show_config() -> None:
    """Prints versions, the instruction set in use and the features of this build."""
    for name, value in config().items():
        print(f"{name:13} {value}")
