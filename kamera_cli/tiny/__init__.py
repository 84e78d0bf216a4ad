"""The embedded model `kamera-tiny`, and the card world that its videos and questions come from.

`world` and `render` need numpy, Pillow and PyAV alone; nothing in this package imports torch or transformers.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """Return the folder that holds the shipped checkpoint, tokenizer and processor.

    Returns
    -------
    pathlib.Path
        A folder that ``AutoProcessor.from_pretrained`` and ``AutoModelForImageTextToText.from_pretrained`` read
        without a network. Its existence is not checked.
    """
    return Path(__file__).resolve().parent / "model"
