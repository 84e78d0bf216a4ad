"""Read a text file."""

from __future__ import annotations

from typing import BinaryIO

from .errors import MediaError

#: A longer text is refused: it is held in memory whole.
MAX_TEXT_BYTES = 64 << 20


def read_text(path: str, file: BinaryIO) -> str:
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
