"""Tell what a file is from its first bytes."""

from __future__ import annotations

from typing import Literal

HEAD_BYTES = 4096

Content = Literal["video", "image", "pdf", "utf16", "text"]

_IMAGE_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")
_ISO_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"moof")
_ISO_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")
_AV_STARTS = (
    b"\x1aE\xdf\xa3",  # Matroska, WebM
    b"FLV\x01",
    b"OggS",
    b"0&\xb2u\x8ef\xcf\x11",  # ASF
    b"\x00\x00\x01\xba",  # MPEG program stream
    b"\x00\x00\x01\xb3",  # MPEG-1 and MPEG-2 video
    b"\x00\x00\x00\x01",  # H.264 and H.265 byte streams
    b"\x00\x00\x01",
    b"DKIF",
    b"\x06\x0e+4\x02\x05\x01\x01",  # MXF
    b"YUV4MPEG2 ",
    b"ID3",
    b"fLaC",
    b"\xff\xf1",  # AAC
    b"\xff\xf9",
    b"\xff\xfb",  # MP3
    b"\xff\xf3",
    b"\xff\xf2",
)
_RIFF_FORMS: dict[bytes, Content] = {b"WEBP": "image", b"AVI ": "video", b"WAVE": "video"}
_TS_PACKET_BYTES = 188

MEDIA_SUFFIXES = frozenset(
    (
        *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".flv"),
        *(".ogv", ".wmv", ".3gp", ".3g2", ".mxf", ".m4a", ".mp3"),
        *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".pdf"),
    )
)


def content_of(head: bytes) -> Content:
    """Say what a file holds.

    Parameters
    ----------
    head : bytes
        Its first `HEAD_BYTES` bytes or all of it; not empty.

    Returns
    -------
    {"video", "image", "pdf", "utf16", "text"}
        "video" stands for every container of moving pictures or sound. "text" stands for all that has no
        known signature: whether it is UTF-8 shows when it is read.
    """
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(_IMAGE_STARTS) or _is_bmp(head):
        return "image"
    if head[:4] == b"RIFF":
        return _RIFF_FORMS.get(head[8:12], "text")
    if head[4:8] in _ISO_BOXES:
        return "image" if _is_iso_image(head) else "video"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf16"
    if head.startswith(_AV_STARTS) or _is_transport_stream(head):
        return "video"
    return "text"


def _is_bmp(head: bytes) -> bool:
    """Whether this is a BMP: two letters are weak, so the sizes of its header have to fit as well."""
    return (
        head[:2] == b"BM"
        and head[6:10] == b"\0\0\0\0"
        and int.from_bytes(head[14:18], "little") in (12, 16, 40, 52, 56, 64, 108, 124)
    )


def _is_iso_image(head: bytes) -> bool:
    return head[4:8] == b"ftyp" and head[8:12] in _ISO_IMAGE_BRANDS


def _is_transport_stream(head: bytes) -> bool:
    """Whether the sync byte starts three packets, with or without a time stamp before each."""
    return any(
        len(head) > offset + 2 * step and all(head[offset + i * step] == 0x47 for i in range(3))
        for offset, step in ((0, _TS_PACKET_BYTES), (4, _TS_PACKET_BYTES + 4))
    )


def declared_bytes(head: bytes) -> int | None:
    """Return the file length that a Matroska or RIFF header names, or None where it names none."""
    if head[:4] == b"RIFF":
        size = int.from_bytes(head[4:8], "little")
        return 8 + size if 0 < size < 0xFFFFFFFF else None
    if head[:4] == b"\x1aE\xdf\xa3":
        return _matroska_bytes(head)
    return None


def _matroska_bytes(head: bytes) -> int | None:
    header = _vint(head, 4)
    if header is None:
        return None
    segment = header[0] + header[1]
    size = _vint(head, segment + 4) if head[segment : segment + 4] == b"\x18S\x80g" else None
    return size[0] + size[1] if size else None


def _vint(data: bytes, at: int) -> tuple[int, int] | None:
    """Read an EBML length: its value and where the next byte stands; None for "unknown" or past the end."""
    if at >= len(data) or data[at] == 0:
        return None
    length = 9 - data[at].bit_length()
    raw = int.from_bytes(data[at : at + length], "big")
    mask = (1 << (7 * length)) - 1
    if at + length > len(data) or raw & mask == mask:
        return None
    return raw & mask, at + length
