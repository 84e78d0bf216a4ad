"""Open a file of any kind: what it is, and its chunks. A decoder is imported by the first file that needs it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from fractions import Fraction

from .chunk import Kind, MediaChunk, Sampling, SourceInfo
from .errors import MediaError, SamplingError, printable
from .files import opened_file
from .sniff import HEAD_BYTES, MEDIA_SUFFIXES, content_of, declared_bytes
from .text import read_text
from .timeline import num_samples

__all__ = [
    "Kind",
    "MediaChunk",
    "MediaError",
    "Sampling",
    "SamplingError",
    "SourceInfo",
    "chunks",
    "inspect",
    "num_chunks",
    "printable",
]


def inspect(path: str | bytes | os.PathLike) -> SourceInfo:
    """Open a file, say what it is, and refuse what cannot be taken in.

    The content decides, not the name. Of a video one frame is decoded and the packets are counted, of an
    image the header is read, a text is read whole; the file is hashed as a stream.

    Parameters
    ----------
    path : str, bytes or path-like
        Any name: with a colon, a newline or bytes that are not UTF-8 too.

    Returns
    -------
    SourceInfo

    Raises
    ------
    MediaError
        If the file is missing, empty, no regular file, of no known kind, damaged or without a usable picture.
    """
    with opened_file(path) as (file, status):
        head = file.read(HEAD_BYTES)
        kind = _kind(path, head)
        file.seek(0)
        content_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        if kind == "video":
            from .video import inspect_video

            found = inspect_video(os.fsdecode(path), file, status.st_size, declared_bytes(head))
        elif kind == "image":
            from .image import inspect_image

            found = inspect_image(os.fsdecode(path), file)
        else:
            read_text(os.fsdecode(path), file)
            found = {"codec": "utf-8", "decoder": "utf-8"}
    return SourceInfo(
        path=printable(os.path.abspath(os.fsdecode(path))),
        kind=kind,
        content_sha256=content_sha256,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        **{"width": None, "height": None, "duration_s": None, "num_frames": None, "stream_index": None}
        | found,
    )


def chunks(path: str | bytes | os.PathLike, info: SourceInfo, sampling: Sampling) -> Iterator[MediaChunk]:
    """Yield the chunks of a file, one at a time.

    Parameters
    ----------
    path : str, bytes or path-like
        The file that `info` was made from.
    info : SourceInfo
        From `inspect`.
    sampling : Sampling
        Of use for video only; an image and a text are one chunk each.

    Yields
    ------
    MediaChunk

    Raises
    ------
    MediaError
        If the file changed since `inspect` or is damaged; chunks that were readable have been yielded before.
    """
    shown = os.fsdecode(path)
    name = printable(os.path.basename(os.path.abspath(shown)))
    with opened_file(path) as (file, status):
        _refuse_changed(path, info, status)
        if info.kind == "video":
            from .video import video_chunks

            yield from video_chunks(shown, name, file, info, sampling)
        elif info.kind == "image":
            from .image import read_image

            yield MediaChunk("image", 0, name, frames=read_image(shown, file))
        else:
            yield MediaChunk("text", 0, name, text=read_text(shown, file))
        _refuse_changed(path, info, os.fstat(file.fileno()))


def num_chunks(info: SourceInfo, sampling: Sampling) -> int:
    """Return how many chunks a file should give, by its packet times; for plans and progress."""
    if info.kind != "video":
        return 1
    last = num_samples(Fraction(info.duration_s or 0.0).limit_denominator(1_000_000), sampling.rate) - 1
    chunk = int(last / sampling.rate / sampling.chunk_length)
    return chunk + 1


def _refuse_changed(path, info: SourceInfo, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (info.size_bytes, info.mtime_ns):
        raise MediaError(path, "it changed while it was being read", "try again when it is finished")


def _kind(path: str | bytes | os.PathLike, head: bytes) -> Kind:
    content = content_of(head)
    if content == "pdf":
        raise MediaError(
            path, "it is a PDF, which is not rendered here", "render its pages to images first: pdftoppm -png"
        )
    if content == "utf16":
        raise MediaError(path, "it is UTF-16 text", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    suffix = os.path.splitext(os.fsdecode(path))[1].lower()
    if content == "text" and suffix in MEDIA_SUFFIXES:
        raise MediaError(path, f"its name ends in {suffix}, but it holds neither video, sound nor a picture")
    return content
