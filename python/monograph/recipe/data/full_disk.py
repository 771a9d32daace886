"""Files that the disk does not take: one line with the file and the reason, and the exit code for it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

# No room, a quota, a limit of the size of files, a disk that is read-only or broken.
_REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# How libraries in Rust and C++ say it inside errors of their own.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[[Ee]rrno (\d+)\]")
# torch.save does not say why.
_TORCH = re.compile(r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+")
EXIT_CODE = 5  # that of the native program for the same


def reason(error: BaseException) -> int | None:
    """The errno of an error that means that the disk did not take a file; None for others."""
    if isinstance(error, OSError) and error.errno in _REASONS:
        return error.errno
    if isinstance(error, ValueError):
        return None
    found = _OS_ERROR.search(str(error))
    number = int(found[1] or found[2]) if found else None
    if number is None:
        number = next((each for each in _REASONS if os.strerror(each) in str(error)), None)
    if number is None and _TORCH.search(str(error)):
        return errno.EIO
    return number if number in _REASONS else None


@contextmanager
def naming_file(path: str, key: str = "output_dir") -> Iterator[None]:
    """Turns what any library says of a full disk into an OSError with the path and the reason. `key` leads
    elsewhere. An error of a file that lies elsewhere stays what it is."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        number = reason(error)
        named = getattr(error, "filename", None)
        elsewhere = isinstance(named, str) and not os.path.abspath(named).startswith(os.path.abspath(path))
        if number is None or elsewhere:
            raise
        raise OSError(
            number, f"{path} was not written: {os.strerror(number)}; make room, or choose another {key}"
        ) from error
