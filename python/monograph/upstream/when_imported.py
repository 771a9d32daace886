"""Runs something once another library is imported: now if it is, else right after its import.

The operators need torch only, so monograph does not import transformers or PEFT by itself; what it changes
there must be in place whichever of the two is imported first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(library: str, module: str) -> None:
    """Imports `module`, one of ours, and calls its `install()` as soon as `library` is there."""
    if library in sys.modules:
        _install(module)
    else:
        sys.meta_path.insert(0, _Finder(library, module))


def _install(module: str) -> None:
    try:
        importlib.import_module(module).install()
    except (ImportError, AttributeError) as error:
        # The library must stay importable; writes to packed weights are refused without us too.
        warnings.warn(f"monograph: {module} does not fit the installed version: {error}", stacklevel=2)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, library: str, module: str) -> None:
        self._library, self._module = library, module
        self._asks_others = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Stays until the library is really imported: a look whether it is installed ends here too."""
        if fullname != self._library or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(loaded: ModuleType) -> None:
                execute(loaded)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _install(self._module)

            spec.loader.exec_module = execute_and_install  # type: ignore[assignment, method-assign]
        return spec
