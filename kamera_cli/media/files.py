"""Open a source file, or say in one line why not; imports no decoder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from .errors import MediaError


@contextmanager
def opened_file(path: str | bytes | os.PathLike) -> Iterator[tuple[BinaryIO, os.stat_result]]:
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


def content_sha256(path: str | bytes | os.PathLike) -> str:
    """Return the SHA-256 of a source file's bytes, hex, read as a stream.

    Raises
    ------
    MediaError
        As `opened_file`.
    """
    with opened_file(path) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()
