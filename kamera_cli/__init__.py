"""Kamera: reuse the KV cache of video, image and text chunks at any position, in any order."""


def __getattr__(name: str) -> str:
    """``__version__``, read when asked for: every start would pay for the look-up."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import version

    return version("kamera-kv")
