"""Another class for one module: a subclass of its own with the same name, and its behaviour before that.

Everybody who asks for the name or the class of a module finds what was there; copies and pickles are of the
subclass too. There is one subclass for all modules of a class.
"""

from __future__ import annotations

import copyreg
from typing import Any


class InstanceClass(type):
    """The class of such subclasses. A pickle of one names the two classes that it is made of."""


_CLASSES: dict[tuple[type, type], Any] = {}


def subclass(ours: type, own: type) -> Any:
    """`ours` before `own`. What depends on `own` is set by `ours.__init_subclass__`, from `__bases__[1]`, for
    classes whose first base is `ours`: others, as fully_shard, make subclasses of these."""
    if (ours, own) not in _CLASSES:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
        _CLASSES[ours, own] = _metaclass(type(own))(own.__name__, (ours, own), names)
    return _CLASSES[ours, own]


def put_before(ours: type, instance: Any) -> None:
    """Gives `instance` the subclass."""
    instance.__class__ = subclass(ours, type(instance))


def own_class(instance: Any) -> type:
    """The class that an instance had before any subclass."""
    found = type(instance)
    while isinstance(found, InstanceClass):
        found = found.__bases__[1]
    return found


def take_off(ours: type, instance: Any) -> None:
    """Takes `ours` out of the class of `instance`, wherever it stands among what was put before."""
    found, outer = type(instance), []
    while isinstance(found, InstanceClass) and found.__bases__[0] is not ours:
        outer.append(found.__bases__[0])
        found = found.__bases__[1]
    if not isinstance(found, InstanceClass):
        raise ValueError(f"{type(instance).__name__} has no {ours.__name__} before it")
    found = found.__bases__[1]
    for cls in reversed(outer):
        found = subclass(cls, found)
    instance.__class__ = found


def _metaclass(of_own: type) -> Any:
    if issubclass(InstanceClass, of_own):
        return InstanceClass
    if issubclass(of_own, InstanceClass):
        return of_own
    mixed = type("InstanceClass", (InstanceClass, of_own), {})
    copyreg.pickle(mixed, _parts)
    return mixed


def _parts(cls: type) -> tuple[Any, tuple[type, ...]]:
    return subclass, cls.__bases__


copyreg.pickle(InstanceClass, _parts)
