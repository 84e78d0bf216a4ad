"""Packages that transformers imports and that a question seldom runs: their own code waits for its first use.

``transformers.modeling_utils`` imports the compiler of torch for three decorators, and torchvision for one enumeration.
Together that takes longer than loading a small model. A package named in `DEFERRED` is found as ever, and so are its
modules; its ``__init__`` runs when something asks it for what it would define. Nothing stays away for good.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DEFERRED = frozenset((
    "torch._dynamo",
    "torchvision",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "transformers.models",
))  # fmt: skip
_COUPLED = {"torch._dynamo": frozenset(("_trace_wrapped_higher_order_op",))}
"""Packages whose modules import each other in a circle, which holds only where ``__init__`` ran first; the ones named
here stand alone."""

_MARKS = ("allow_in_graph", "assume_constant_result")
"""Decorators of the compiler that leave a function as it is, and note it for a compilation."""


def install() -> None:
    """Defer the packages of `DEFERRED` that are not loaded yet, for this whole process.

    This changes how Python imports, so it is for a program and never for a library: ``kamera`` calls it when it starts,
    and importing ``kamera_cli`` does not.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if name not in _COUPLED.get(parent, (name,)) and isinstance(sys.modules.get(parent), _Waiting):
            _run(sys.modules[parent])
            if fullname in sys.modules:
                return ModuleSpec(fullname, _Loaded(sys.modules[fullname]))
        spec = PathFinder.find_spec(fullname, path, target) if fullname in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Makes the module of another loader, and leaves it to run at the first use of it."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Waiting
        if module.__name__ == "torch._dynamo":
            vars(module).update(_decorators(module))


class _Loaded(Loader):
    """Hands out a module that its package has imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


_LOCK = threading.RLock()


class _Waiting(ModuleType):
    """A package whose own code has not run. Its modules can be imported all the same."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        own = f"{self.__name__}.{name}"
        if self.__name__ not in _COUPLED and importlib.util.find_spec(own) is not None:
            return importlib.import_module(own)
        return getattr(_run(self), name)


def _run(module: ModuleType) -> ModuleType:
    """The module after its own code ran, for the first caller in this process."""
    with _LOCK:
        spec = module.__spec__
        if isinstance(module, _Waiting) and spec is not None and isinstance(spec.loader, _Later):
            ModuleType.__setattr__(module, "__class__", ModuleType)
            marked = vars(module).pop("_marked", [])
            module.__loader__ = spec.loader = spec.loader.own
            spec.loader.exec_module(module)
            for mark, function in marked:
                getattr(module, mark)(function)
    return sys.modules[module.__name__]


def _decorators(module: ModuleType) -> dict[str, object]:
    """Stand-ins for the decorators of ``torch._dynamo``: what they ask for is done once the compiler is loaded."""
    marked: list[tuple[str, Callable]] = []

    def marking(mark: str, function: Callable) -> Callable:
        marked.append((mark, function))
        return function

    def disable(fn: Callable | None = None, recursive: bool = True, **options: Any) -> Callable:
        if fn is None:
            return functools.partial(disable, recursive=recursive, **options)

        @functools.wraps(fn)
        def called(*args: object, **kwargs: object) -> object:
            # Nothing is compiled before the compiler is loaded.
            plain = isinstance(module, _Waiting)
            return (fn if plain else module.disable(fn, recursive, **options))(*args, **kwargs)

        return called

    marks = {mark: functools.partial(marking, mark) for mark in _MARKS}
    return {"_marked": marked, "disable": disable, **marks}
