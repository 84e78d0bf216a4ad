"""Versions of the rules by which media become chunks, and of the libraries that decode; imports no decoder."""

from __future__ import annotations

from importlib.metadata import version

#: Which frame serves which sample (`timeline`); raise a number when its rule would give another result.
SAMPLING_RULES = "nearest-1"
#: How a video frame becomes upright RGB (`pixels`).
PIXEL_RULES = "pixels-1"
#: How an image becomes upright RGB (`image`).
IMAGE_RULES = "image-1"
#: How bytes become text (`text`).
TEXT_RULES = "text-1"

#: All of them: part of the source index key.
RULES = f"{SAMPLING_RULES} {PIXEL_RULES} {IMAGE_RULES} {TEXT_RULES}"


def decoder_versions() -> str:
    """Return the installed decoders, such as ``av 18.1.0 pillow 13.0.0``, for the source index key."""
    return " ".join(f"{name} {version(name)}" for name in ("av", "pillow"))
