"""Errors of media input; each one is a single line that names the file."""

from __future__ import annotations

import os

from ..errors import KameraError, UsageError


def printable(path: str | bytes | os.PathLike) -> str:
    """Return a name as one line of valid UTF-8, for showing only.

    Parameters
    ----------
    path : str, bytes or path-like
        Any file name, also one with newlines or bytes that are not UTF-8.

    Returns
    -------
    str
        The same text; control characters, line separators, direction marks and undecodable bytes stand as
        backslash escapes. It may not name the file any more: open the path that was given, not this.
    """
    text = os.fsdecode(path)
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


class SamplingError(UsageError, ValueError):
    """A sampling that no clip could be cut by, such as a rate of zero."""


class MediaError(KameraError):
    """A file that cannot be taken in.

    Parameters
    ----------
    path : str, bytes or path-like
        The file.
    reason : str
        What is wrong with it.
    hint : str, optional
        What to do about it.

    Attributes
    ----------
    path : str
        The file's name, `printable`.
    reason, hint : str
        As given, on one line each.
    """

    def __init__(self, path: str | bytes | os.PathLike, reason: str, hint: str = "") -> None:
        self.path = printable(path)
        self.reason = _one_line(reason)
        self.hint = _one_line(hint)
        super().__init__(f"{self.path}: {self.reason}" + (f"; {self.hint}" if self.hint else ""))

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.reason, self.hint)


class UnfitMediaError(MediaError):
    """A sound file that the model at hand cannot take: another kind of media, or more than its context or processor
    takes (exit code 2)."""

    exit_code = 2


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
