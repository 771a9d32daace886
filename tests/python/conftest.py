"""For all tests: how the programs that they start find `support`.

Files whose tests generate code, train or run other programs are marked: `pytestmark = pytest.mark.slow`. The
tests that take longest of all, two fifths of the time, are marked `long`.
"""

from __future__ import annotations

import os
import pathlib

# Programs that tests start import `support` too.
_PATHS = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in _PATHS if path)
