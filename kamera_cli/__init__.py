"""Kamera: reuse the KV cache of video, image and text chunks at any position, in any order.

``from kamera_cli import Engine, Settings, Window`` is what most programs need; it loads no torch. The options and
results of each call stand in `kamera_cli.options` and `kamera_cli.results`, what it may raise in `kamera_cli.errors`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kamera_cli.engine import Engine
    from kamera_cli.handle import Window
    from kamera_cli.settings import Settings

__all__ = ["Engine", "Settings", "Window"]

_HOMES = {"Engine": "engine", "Window": "handle", "Settings": "settings"}


def __getattr__(name: str) -> object:
    """A name of `__all__` or ``__version__``, found when asked for: every start would pay for the look-up."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"kamera_cli.{_HOMES[name]}"), name)
    if name != "__version__":
        raise AttributeError(f"module 'kamera_cli' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kamera-kv")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
