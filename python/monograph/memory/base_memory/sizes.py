"""Amounts of memory as people write them: 3GiB, 800 MB, 1073741824."""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def bytes_of(amount: int | str) -> int:
    """An amount in bytes; 3GiB is 3 * 2**30 and 3GB is 3 * 10**9."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(amount))
    if isinstance(amount, bool) or found is None or found[2] not in UNITS:
        raise ValueError(f"base_memory is {amount!r}, wanted bytes, or a number with MiB, GiB, MB or GB")
    count = int(float(found[1]) * UNITS[found[2]])
    if count <= 0:
        raise ValueError(f"base_memory is {amount!r}, wanted more than 0")
    return count
