"""Typed errors of the engine; ``app.py`` alone turns them into exit codes."""

from __future__ import annotations


class KameraError(Exception):
    """Base of every error a user can meet. ``str()`` is one line: what happened, to which object, what to do."""

    exit_code = 1


class UsageError(KameraError):
    """The request itself makes no sense (exit code 2)."""

    exit_code = 2


class NotFoundError(KameraError):
    """A chunk, window or file is not there, or a miss under ``--require-hit`` (exit code 3)."""

    exit_code = 3


class RefusedError(KameraError):
    """The model, tenant, format or architecture does not fit (exit code 4)."""

    exit_code = 4


class UnknownFactorsError(RefusedError):
    """A newer kamera wrote a patch in a way that this one cannot read (exit code 4).

    Parameters
    ----------
    patch : str
        Its id.
    kind : str
        What its factors are.
    known : str
        What this version reads.
    """

    def __init__(self, patch: str, kind: str, known: str) -> None:
        self.patch, self.kind, self.known = patch, kind, known
        super().__init__(
            f"patch {patch[:10]} has factors of kind {kind!r}, this version of kamera reads {known}; "
            "upgrade kamera to use this store"
        )


class PartialFailure(KameraError):
    """Some sources of a batch failed; the others are done (exit code 1)."""


class NotFiniteError(RefusedError):
    """The model's numbers overflow in its dtype: no answer, measure or patch can be made of them (exit code 4)."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} holds NaN or infinity in this dtype; use --dtype bf16 or fp32")
