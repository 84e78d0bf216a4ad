"""Values that their first use makes, once, whichever thread comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_MISSING: Any = object()


class once(Generic[T]):
    """A value of a `Lazy` that its first use makes, under the lock of the object: others wait and get the same one.

    ``functools.cached_property`` takes no lock since Python 3.12: two threads that ask first would load a model twice.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> once[T]: ...
    @overload
    def __get__(self, owner: Lazy, kind: type) -> T: ...
    def __get__(self, owner: Lazy | None, kind: type) -> once[T] | T:
        return self if owner is None else owner.first(self._name, self._make)


class Lazy:
    """What `once` keeps its values in. A shallow copy shares them.

    Parameters
    ----------
    made : dict
        Values that are there already, by name.
    """

    def __init__(self, made: dict[str, Any]) -> None:
        self._made = made
        self._lock = threading.RLock()

    def first(self, name: str, make: Callable[[Any], T]) -> T:
        """A value by name, made where there is none. One lock serves all, since one value is made from another."""
        made: T = self._made.get(name, _MISSING)
        if made is _MISSING:
            with self._lock:
                made = self._made.get(name, _MISSING)
                if made is _MISSING:
                    made = self._made[name] = make(self)
        return made

    def made(self, name: str) -> Any:
        """A value that was made; None where it was not."""
        return self._made.get(name)

    def forget(self, *names: str) -> list[Any]:
        """Drop values, which their next use makes again; those that were there, and None for the others."""
        with self._lock:
            return [self._made.pop(name, None) for name in names]
