"""PrivateName: one name of another library that is not promised, and where it was read."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from monograph.upstream.tested_versions import TRIED, warn_if_untried


@dataclass(frozen=True)
class PrivateName:
    """`path` is "module:attribute.attribute". What only instances have is "module:Class().attribute"; the
    test of the names makes the instance."""

    path: str
    read_in: str  # version of the library whose source was read
    purpose: str
    formerly: str | None = None  # path of the same thing in the lowest version that is supported

    @property
    def library(self) -> str:
        return self.path.partition(":")[0].partition(".")[0]

    @property
    def of_instances(self) -> bool:
        return "()." in self.path

    def load(self) -> Any:
        """The object behind the name; an ImportError says what is gone and what needs it."""
        try:
            return _resolved(self.path)
        except (ImportError, AttributeError) as error:
            if self.formerly is not None:
                return replace(self, path=self.formerly, formerly=None).load()
            raise ImportError(self.gone(str(error))) from error

    def gone(self, reason: str) -> str:
        try:
            installed = importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.library} is not installed; {self.path} is needed for: {self.purpose}"
        return (
            f"{self.library} {installed} has no {self.path} ({reason}); it was read in {self.library} "
            f"{self.read_in} and is needed for: {self.purpose}"
        )


def _resolved(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def loads_on_use(module: str, names: Mapping[str, PrivateName]) -> Callable[[str], Any]:
    """The `__getattr__` of a module of private names: a name is looked up when it is imported, not before.

    Warns if the library's version was never tried: whoever uses a library comes by its private names.
    """
    library = module.split(".")[-2]
    if library in TRIED:
        warn_if_untried(library)

    def load(name: str) -> Any:
        if name not in names or names[name].of_instances:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return names[name].load()

    return load
