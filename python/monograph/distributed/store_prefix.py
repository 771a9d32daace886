"""A prefix for keys in a store that outlives the processes: what earlier ones left there is never read.

torchrun's store survives `--max-restarts`, and gloo takes the addresses of dead processes from it. Neither
the number of the restart nor that of the ranks tells starts apart: hosts count restarts on their own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

_POLL = 0.01


def store_prefix(store: Any, rank: int, size: int, timeout: float) -> str:
    """A name that rank 0 drew for this start, the same on all of its ranks.

    Every other rank draws a number, writes it down and waits for the answer to this number: only a rank 0
    that lives now can give it. Rank 0 answers each number it finds, of the dead too, until all ranks have
    written that they are here under its name.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"monograph/hello/{size}/{rank}", mine)
        try:
            store.wait([f"monograph/answer/{mine}"], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise RuntimeError(f"rank 0 of {size} has not joined in {timeout:.0f} s") from error
        name = str(store.get(f"monograph/answer/{mine}").decode())
        store.set(f"monograph/{name}/here/{rank}", "")
        return f"monograph/{name}"
    end = time.monotonic() + timeout
    answered: set[str] = set()
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            hello = f"monograph/hello/{size}/{other}"
            if store.check([hello]):
                number = store.get(hello).decode()
                if number not in answered:
                    store.set(f"monograph/answer/{number}", mine)
                    answered.add(number)
            if store.check([f"monograph/{mine}/here/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            named = ", ".join(map(str, sorted(missing)))
            raise RuntimeError(f"rank {named} of {size} has not joined in {timeout:.0f} s")
        time.sleep(_POLL if missing else 0)
    return f"monograph/{mine}"
