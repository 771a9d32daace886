"""Whether fresh memory is mapped anew for each large tensor, or recycled."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_TOP_PAD = -1, -4, -2


def recycle_large_blocks() -> None:
    """Raises glibc's thresholds so that freed blocks are used again instead of being unmapped.

    By default each tensor above 32 MiB is a new mapping whose pages fault one by one: for both sides of a
    benchmark alike, so this is set for the whole process.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_M_TOP_PAD, 256 * 2**20)
