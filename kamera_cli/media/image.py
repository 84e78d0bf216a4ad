"""Read an image file as upright 8-bit RGB."""

from __future__ import annotations

import logging
import struct
import warnings
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import PIL
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
    features,
)

from .errors import MediaError

#: Largest picture that is read: a 2 MB file can name a picture of gigabytes. Pillow warns above this.
MAX_IMAGE_PIXELS = 89_478_485

# Pillow knows a format once its plug-in is imported; nothing else is ever tried on a file.
FORMATS = (
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    GifImagePlugin.GifImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
    TiffImagePlugin.TiffImageFile.format,
    AvifImagePlugin.AvifImageFile.format,
)

# Pillow logs some faults besides raising them; without a handler that line would go to stderr.
logging.getLogger("PIL").addHandler(logging.NullHandler())

_ORIENTATION = 0x0112
_UPRIGHT = 1
_DEGREES_CLOCKWISE = {3: 180, 4: 180, 5: 270, 6: 90, 7: 90, 8: 270}
_MIRRORED = (2, 4, 5, 7)
_SWAPPED_SIDES = (5, 6, 7, 8)
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TRANSPARENT_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_HIGHEST_16_BIT = 65535
# What Pillow's plug-ins raise on damaged bytes, found by changing bytes at random.
_READ_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    RuntimeError,
    struct.error,
)


def decoder_name() -> str:
    """Return what decodes images, with the versions of the libraries that can change a pixel."""
    parts = [f"pillow {PIL.__version__}"]
    for name, feature in (("libjpeg-turbo", "libjpeg_turbo"), ("webp", "webp"), ("avif", "avif")):
        version = features.version(feature)
        if version:
            parts.append(f"{name} {version}")
    return " ".join(parts)


def inspect_image(path: str, file: BinaryIO) -> dict:
    """Read the header of an image.

    Parameters
    ----------
    path : str
        For errors.
    file : binary file
        Open at its start.

    Returns
    -------
    dict
        The fields of `SourceInfo` that a picture settles: width, height, codec, decoder, rotation, notes.

    Raises
    ------
    MediaError
        For an unknown or damaged header, or more than `MAX_IMAGE_PIXELS`.
    """
    with _opened(path, file) as image:
        orientation, notes = _orientation(image)
        width, height = image.size
        if orientation in _SWAPPED_SIDES and image.format != TiffImagePlugin.TiffImageFile.format:
            width, height = height, width
        return {
            "width": width,
            "height": height,
            "num_frames": 1,
            "codec": (image.format or "").lower(),
            "decoder": decoder_name(),
            "rotation": _DEGREES_CLOCKWISE.get(orientation, 0),
            "notes": notes + _conversion_notes(image, orientation),
        }


def read_image(path: str, file: BinaryIO) -> np.ndarray:
    """Decode an image.

    The rules, in this order: the first picture of an animation or of several pages; orientation from EXIF
    applied; 16-bit grey scaled to 8 bits (v * 255 / 65535, rounded), 16-bit colour by its high bytes;
    palettes looked up; transparency laid over white; CMYK and other colour models converted to RGB by
    Pillow; embedded colour profiles are not applied. Grey becomes three equal channels.

    Parameters
    ----------
    path : str
        For errors.
    file : binary file
        Open at its start.

    Returns
    -------
    np.ndarray
        uint8 (H, W, 3), RGB, C-contiguous.

    Raises
    ------
    MediaError
        As `inspect_image`, for pixels that are damaged or cut short, and for floating point or 32-bit pixels.
    """
    with _opened(path, file) as image:
        image.load()
        orientation, _ = _orientation(image)  # after loading: Pillow itself turns TIFF and then says upright
        rgb = _to_rgb(path, image)
        if orientation != _UPRIGHT:
            rgb = rgb.transpose(_TO_UPRIGHT[orientation])
        return np.array(rgb)


@contextmanager
def _opened(path: str, file: BinaryIO):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_IMAGE_PIXELS:
                    raise _too_large(path, f"{image.width}x{image.height}")
                yield image
    except UnidentifiedImageError as error:
        raise MediaError(
            path,
            "the picture cannot be read: damaged, or a format without a decoder here",
            f"readable are {', '.join(FORMATS)}",
        ) from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise _too_large(path, str(error)) from error
    except _READ_FAULTS as error:
        raise MediaError(path, f"the picture is damaged or cut short ({error})") from error


def _too_large(path: str, what: str) -> MediaError:
    return MediaError(
        path, f"the picture is too large ({what})", f"at most {MAX_IMAGE_PIXELS:,} pixels are read"
    )


def _orientation(image: Image.Image) -> tuple[int, tuple[str, ...]]:
    """Read the EXIF orientation, 1 to 8; a damaged block counts as upright and is noted."""
    try:
        value = image.getexif().get(_ORIENTATION, _UPRIGHT)
    except _READ_FAULTS:
        return _UPRIGHT, ("the EXIF block is damaged: taken as upright",)
    return (value if value in range(1, 9) else _UPRIGHT), ()


def _conversion_notes(image: Image.Image, orientation: int) -> tuple[str, ...]:
    """Name the rules of `read_image` that change this picture more than its storage format."""
    notes = []
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        notes.append(f"the first of {frames} pictures is taken")
    if orientation != _UPRIGHT:
        mirrored = ", mirrored" if orientation in _MIRRORED else ""
        notes.append(f"turned {_DEGREES_CLOCKWISE.get(orientation, 0)} degrees clockwise{mirrored} (EXIF)")
    if image.mode in _SIXTEEN_BIT_MODES:
        notes.append("16-bit grey scaled to 8 bits")
    if _is_transparent(image):
        notes.append("transparency laid over white")
    if image.info.get("icc_profile"):
        notes.append("the embedded colour profile is not applied")
    return tuple(notes)


def _is_transparent(image: Image.Image) -> bool:
    return image.mode in _TRANSPARENT_MODES or "transparency" in image.info


def _to_rgb(path: str, image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise MediaError(
            path, "its pixels are floating point numbers, which have no agreed white", "save it as 8 bit"
        )
    if image.mode in _SIXTEEN_BIT_MODES:
        return _from_16_bit(path, image)
    if not _is_transparent(image):
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")


def _from_16_bit(path: str, image: Image.Image) -> Image.Image:
    grey = np.asarray(image).astype(np.int64)
    if grey.size and (grey.min() < 0 or grey.max() > _HIGHEST_16_BIT):
        raise MediaError(path, f"grey reaches {grey.max()}, more than 16 bits", "save it as 8 or 16 bit")
    return Image.fromarray(((grey * 255 + _HIGHEST_16_BIT // 2) // _HIGHEST_16_BIT).astype(np.uint8)).convert(
        "RGB"
    )
