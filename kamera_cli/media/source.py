"""Open a file of any kind: what it is, and its chunks. A decoder is imported by the first file that needs it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from importlib.metadata import version
from io import BufferedReader

from .chunk import Kind, MediaChunk, Sampling, SourceInfo, num_samples
from .errors import MediaError, SamplingError, printable
from .sniff import HEAD_BYTES, MEDIA_SUFFIXES, content_of, declared_bytes

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

SAMPLING_RULES, PIXEL_RULES, IMAGE_RULES, TEXT_RULES = "nearest-1", "pixels-1", "image-1", "text-1"
"""Versions of the rules by which media become chunks: which frame serves which sample (`chunk`), how a frame (`pixels`)
or an image (`image`) becomes upright RGB, how bytes become text. Raise a number when its rule gives other results."""

RULES = f"{SAMPLING_RULES} {PIXEL_RULES} {IMAGE_RULES} {TEXT_RULES}"
"""All of them: part of the source index key."""

MAX_TEXT_BYTES = 64 << 20
"""A longer text is refused: it is held in memory whole."""


def decoder_versions() -> str:
    """Return the installed decoders, such as ``av 18.1.0 pillow 13.0.0``, for the source index key."""
    return " ".join(f"{name} {version(name)}" for name in ("av", "pillow"))


@contextmanager
def opened_file(path: str | bytes | os.PathLike[str]) -> Iterator[tuple[BufferedReader, os.stat_result]]:
    """Open a regular file that is not empty; a pipe or a device would block for ever.

    Parameters
    ----------
    path : str, bytes or path-like
        Any name: with a colon, a newline or bytes that are not UTF-8 too.

    Yields
    ------
    file : binary file
        At its start.
    status : os.stat_result
        Of the open file.

    Raises
    ------
    MediaError
        If it cannot be opened, is a folder or no regular file, is empty, or a read within the context fails.
    """
    if "\0" in os.fsdecode(path):
        raise MediaError(path, "its name holds a null character")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise MediaError(path, "it is a folder", "name the files in it")
        if not stat.S_ISREG(mode):
            raise MediaError(path, "it is no regular file")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise MediaError(path, "it is empty")
            yield file, status
    except OSError as error:
        raise MediaError(path, error.strerror or str(error)) from error


def content_sha256(path: str | bytes | os.PathLike[str]) -> str:
    """Return the SHA-256 of a source file's bytes, hex, read as a stream.

    Raises
    ------
    MediaError
        As `opened_file`.
    """
    with opened_file(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def inspect(path: str | bytes | os.PathLike[str]) -> SourceInfo:
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
            _read_text(os.fsdecode(path), file)
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


def chunks(
    path: str | bytes | os.PathLike[str], info: SourceInfo, sampling: Sampling
) -> Iterator[MediaChunk]:
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
            yield MediaChunk("text", 0, name, text=_read_text(shown, file))
        _refuse_changed(path, info, os.fstat(file.fileno()))


def num_chunks(info: SourceInfo, sampling: Sampling) -> int:
    """Return how many chunks a file should give, by its packet times; for plans and progress."""
    if info.kind != "video":
        return 1
    last = num_samples(Fraction(info.duration_s or 0.0).limit_denominator(1_000_000), sampling.rate) - 1
    chunk = int(last / sampling.rate / sampling.chunk_length)
    return chunk + 1


def _read_text(path: str, file: BufferedReader) -> str:
    """Read UTF-8 text; a byte order mark is dropped, line ends stay as they are.

    Parameters
    ----------
    path : str
        For errors.
    file : binary file
        Open at its start.

    Returns
    -------
    str
        Not empty.

    Raises
    ------
    MediaError
        For bytes that are not UTF-8, null characters (a binary file), no text at all, or more than
        `MAX_TEXT_BYTES`.
    """
    data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise MediaError(path, f"the text is longer than {MAX_TEXT_BYTES >> 20} MiB", "cut it into parts")
    null = data.find(b"\0")
    if null >= 0:
        raise MediaError(path, f"it is of no known kind: no signature of a medium, and a null byte at {null}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MediaError(
            path,
            f"it is of no known kind: no signature of a medium, and no UTF-8 (byte {error.start})",
            "save text as UTF-8",
        ) from error
    if not text.strip():
        raise MediaError(path, "it holds no text")
    return text


def _refuse_changed(path: str | bytes | os.PathLike[str], info: SourceInfo, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (info.size_bytes, info.mtime_ns):
        raise MediaError(path, "it changed while it was being read", "try again when it is finished")


def _kind(path: str | bytes | os.PathLike[str], head: bytes) -> Kind:
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
