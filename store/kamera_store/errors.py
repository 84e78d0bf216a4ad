"""Every way in which the store refuses, each with both sides named so that a caller can act on it.

Each class keeps its parameters as attributes; keys are 16 bytes.
"""

from __future__ import annotations


class KameraStoreError(Exception):
    """Root of all errors that the store raises on purpose.

    Attributes
    ----------
    exit_code : int
        What a command line program ends with: 1 failed, 3 not found, 4 refused, 5 damaged data, 6 no room.
    """

    exit_code: int = 1


class NotAStoreError(KameraStoreError):
    """The path holds no store, or something else stands there: `why` says what."""

    exit_code = 4

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = str(path), why
        super().__init__(f"no kamera store at {path}: {why}")


class FormatVersionError(KameraStoreError):
    """The bytes on disk follow another version of the format; `what` carries the version."""

    exit_code = 4

    def __init__(self, found: int | str, supported: int | str, what: str = "store") -> None:
        self.found, self.supported, self.what = found, supported, what
        super().__init__(f"{what} has format version {found}, this program reads version {supported}")


class StoreRefusedError(KameraStoreError):
    """The surroundings do not allow a safe store: owner, permissions, file system, locks or address space.

    The message says what to set.
    """

    exit_code = 4


class NewerRecordError(FormatVersionError):
    """A record's header is as it was written, and names something that only a newer program knows.

    `what` is a record kind, a dtype or a codec; `found` is what the header names.
    """

    def __init__(self, key: bytes, what: str, found: object, known: str) -> None:
        super().__init__(str(found), known, what)
        self.key = bytes(key)
        self.args = (
            f"record {self.key.hex()[:10]} was written by a newer kamera: {what} {found!r}, "
            f"this program knows {known}",
        )


class ReadOnlyError(KameraStoreError):
    """A write was asked of a store that was opened for reading."""


class StoreBusyError(KameraStoreError):
    """An operation that needs the store alone found another process in it."""


class ConflictError(KameraStoreError):
    """Compare-and-swap of a state value failed: its version is `found`, not `expected`; None means absent."""

    def __init__(self, space: str, name: str, expected: int | None, found: int | None) -> None:
        self.space, self.name, self.expected, self.found = space, name, expected, found
        super().__init__(f"state {space}/{name}: expected version {expected}, found {found}")


class UnsupportedDtypeError(KameraStoreError):
    """A tensor has a dtype that the format does not define."""

    exit_code = 4

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"dtype {name!r} has no place in the store format")


class MissingRecordError(KameraStoreError):
    """A record in hand is no longer in the store (evicted or purged meanwhile)."""

    exit_code = 3

    def __init__(self, key: bytes) -> None:
        self.key = bytes(key)
        super().__init__(f"record {self.key.hex()[:10]} is no longer in the store")


class DamagedError(KameraStoreError):
    """Stored bytes are not what was written: `what` was checked. The key is None if the damage is not of one record."""

    exit_code = 5

    def __init__(self, key: bytes | None, what: str, expected: object, found: object) -> None:
        self.key = None if key is None else bytes(key)
        self.what, self.expected, self.found = what, expected, found
        of = "" if self.key is None else f"entry {self.key.hex()[:10]}: "
        super().__init__(f"{of}damaged {what}: expected {expected}, found {found}")


class NotAKameraEntryError(DamagedError):
    """A value under a record key is something else altogether, for example a pickle."""

    def __init__(self, key: bytes | None, what: str, expected: object, found: object) -> None:
        super().__init__(key, what, expected, found)
        of = "entry" if self.key is None else f"entry {self.key.hex()[:10]}"
        self.args = (f"{of} is not a kamera entry: {what}: expected {expected}, found {found}",)


class StoreDamagedError(DamagedError):
    """The data file as a whole cannot be read safely."""

    def __init__(self, path: str, what: str, expected: object, found: object) -> None:
        super().__init__(None, what, expected, found)
        self.path = str(path)
        self.args = (
            f"store {path} is damaged: {what}: expected {expected}, found {found}; "
            "run `kamera verify` to save what can be read, or move the folder away",
        )


class NoRoomError(KameraStoreError):
    """A write needs more room than the limit (``quota`` or ``disk``) leaves, even after eviction."""

    exit_code = 6

    def __init__(self, needed_bytes: int, room_bytes: int, limit: str = "quota") -> None:
        self.needed_bytes, self.room_bytes, self.limit = int(needed_bytes), int(room_bytes), limit
        super().__init__(
            f"no room: {self.needed_bytes} bytes needed, {self.room_bytes} can be had ({limit}); "
            "evict or unpin chunks, raise the quota, or free disk space"
        )


UNREADABLE = (DamagedError, FormatVersionError)
"""Why a stored header gives no record: its bytes are not what was written, or a newer program wrote it."""


class DamagedRecordWarning(UserWarning):
    """An entry was skipped because its bytes are not what was written."""


class NewerRecordWarning(UserWarning):
    """An entry was skipped because a newer program wrote it; it stays in the store as it is."""


class IdentityWarning(UserWarning):
    """Two different contents met under one key; the stored one was not used."""
