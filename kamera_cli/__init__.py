"""Kamera: reuse the KV cache of video, image and text chunks at any position, in any order."""


def __getattr__(name: str) -> str:
    """``__version__``, read when asked for: every start would pay for the look-up."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kamera-kv")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
