"""Which versions of other libraries this release was tried with; a warning, once, for any other.

bench/results/versions.md has the commands. Patch releases of a version count as tried.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings

# The lowest and highest version, as (major, minor).
TRIED = {
    "accelerate": ((1, 15), (1, 15)),
    "peft": ((0, 21), (0, 21)),
    "torch": ((2, 11), (2, 15)),
    "transformers": ((5, 22), (5, 23)),
    "trl": ((1, 16), (1, 16)),
}
# Of libraries that compute operators of ours (ops/providers.py): another version is not taken by itself.
PROVIDERS = {
    "fla-core": ((0, 6), (0, 6)),
    "flash-attn": ((2, 8), (2, 8)),
}
_WARNED: set[str] = set()


def untried(library: str) -> tuple[str, str] | None:
    """The version found and those that were tried; None for one of them, or for none installed."""
    try:
        installed = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    lowest, highest = (TRIED | PROVIDERS)[library]
    if numbers is not None and lowest <= (int(numbers[1]), int(numbers[2])) <= highest:
        return None
    tried = ".".join(map(str, lowest))
    return installed, tried if highest == lowest else tried + " to " + ".".join(map(str, highest))


def warn_if_untried(library: str) -> None:
    """A UserWarning that names both versions. Nothing for a library that is not installed."""
    if library in _WARNED:
        return
    _WARNED.add(library)
    if (found := untried(library)) is not None:
        warnings.warn(
            f"monograph was never tried with {library} {found[0]}, only with {found[1]}: "
            "run tools/check_versions.py of the source before you trust it",
            stacklevel=2,
        )
