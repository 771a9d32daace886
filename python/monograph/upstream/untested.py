"""What compiles on a torch that was never tested: nothing.

Compiled modes rely on names that torch does not promise (torch_names.py). One that is gone raises; one that
means something else would be found by the tests alone, and they have not run there.
"""

from __future__ import annotations

import logging
import os

from monograph.upstream.tested_versions import untried

ANYWAY = "MONOGRAPH_UNTESTED_TORCH"  # set to 1 by whoever tests a new torch
_log = logging.getLogger("monograph")


def mode_on_this_torch(mode: str) -> str:
    """The mode of a step, or "eager" with a warning."""
    found = None if mode == "eager" or os.environ.get(ANYWAY) == "1" else untried("torch")
    if found is None:
        return mode
    _log.warning(
        "monograph: torch %s has not been tested (tested: %s): mode eager instead of %s, which relies on "
        "names that torch does not promise; %s=1 compiles all the same",
        *found,
        mode,
        ANYWAY,
    )
    return "eager"
