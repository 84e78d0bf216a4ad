"""What every store of records can do, whatever keeps the bytes: the verbs, and those that follow from other verbs.

``tests/store/conformance.py`` holds the tests that each implementation must pass.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from kamera_store.errors import IdentityWarning
from kamera_store.format.keys import Identity
from kamera_store.format.records import Record, TensorBytes, references


@dataclass(frozen=True)
class State:
    """A stored small value, strict JSON, and its version, which grows with every write."""

    value: dict[str, Any]
    version: int


class Store(ABC):
    """Records, found by key and proved by digest, and small values with a version. A context manager.

    Records that cannot be read are errors to whoever names them (`get`, `find`, `read`) and are skipped with a warning
    where many are listed. What a newer program wrote is refused with `FormatVersionError` and never changed.
    """

    read_only: bool = False

    @abstractmethod
    def close(self) -> None:
        """Give the store back; it is not used afterwards. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Writing

    @abstractmethod
    def put(
        self,
        identity: Identity,
        *,
        tenant: str,
        unit: str,
        meta: Mapping[str, Any],
        tensors: Iterable[TensorBytes],
        cost_ms: float,
        created_s: float | None = None,
        replace: bool = False,
    ) -> bool:
        """Store a record, all of it or nothing.

        Parameters
        ----------
        identity : Identity
            Its kind, key and digest.
        tenant, unit : str
            Who owns it, and the media unit that it is evicted with.
        meta : mapping
            Strict JSON. A patch names its ``chunk`` (hex key) and its ``antecedents`` (list of hex keys).
        tensors : iterable of TensorBytes
            No two with the same name and layer.
        cost_ms : float
            What it took to make.
        created_s : float, optional
            Unix time in seconds; now by default.
        replace : bool
            Write over a record of the same identity, in one step with its removal.

        Returns
        -------
        bool
            True if it was written. False if nothing was: either the same content is there already, or another
            content stands under the same key, which is kept and reported by an `IdentityWarning`. A damaged
            record under the key is replaced.

        Raises
        ------
        FormatVersionError
            If a newer program's record stands under the key; it stays.
        NoRoomError
            If there is no room even after evicting what may go.
        ReadOnlyError, ValueError, UnsupportedDtypeError
        """

    def put_all(self, items: Sequence[Mapping[str, Any]], *, replace: bool = False) -> None:
        """Store several records, in one step where the store can, else one by one.

        Each item has the keyword arguments of `put`, without ``replace``. Errors as in `put`; the records before the
        failing one then stay.
        """
        for item in items:
            self.put(**item, replace=replace)

    # Finding

    @abstractmethod
    def get(self, key: bytes) -> Record | None:
        """The record under a key whoever owns it, or None.

        Raises
        ------
        DamagedError, FormatVersionError
            If the stored header is damaged (`NotAKameraEntryError`: is none), or of a newer program.
        """

    @abstractmethod
    def iterate(self, kind: str | None = None, tenant: str | None = None) -> Iterator[Record]:
        """All records in id order; unreadable ones are skipped with a warning.

        Writes may happen between two records.
        """

    def find(self, identity: Identity, *, tenant: str) -> Record | None:
        """The record of this content for this tenant, or None; raises as `get`.

        The SHA-256 is compared. Another content under the same key is a miss with an `IdentityWarning`.
        """
        record = self.get(identity.key)
        return record if record is not None and is_same(record, identity, tenant) else None

    def resolve(self, prefix: str, kind: str | None = None, tenant: str | None = None) -> list[Record]:
        """Records whose id begins with a hex prefix, in id order; unreadable ones are skipped with a warning."""
        text = prefix.lower()
        if not is_prefix(text):
            return []
        return [record for record in self.iterate(kind, tenant) if record.id.startswith(text)]

    def patches_of(self, chunk_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches of a chunk."""
        return [patch for patch in self.iterate("patch", tenant) if references(patch)[0] == chunk_key]

    def patches_naming(self, antecedent_key: bytes, tenant: str | None = None) -> list[Record]:
        """Patches that have a chunk among their antecedents."""
        return [patch for patch in self.iterate("patch", tenant) if antecedent_key in references(patch)[1]]

    # Reading

    @abstractmethod
    def read(
        self, record: Record, wanted: Iterable[tuple[str, int]] | None = None
    ) -> dict[tuple[str, int], TensorBytes]:
        """Tensors of a record, each checked: length, checksum, declared size, exact size.

        Parameters
        ----------
        record : Record
            From `find`, `get` or `iterate`.
        wanted : iterable of (name, layer), optional
            Which tensors; all by default.

        Returns
        -------
        dict
            By (name, layer). The bytes are fresh, writable and shared with nobody.

        Raises
        ------
        KeyError
            If the record has no such tensor.
        DamagedError
            If any check fails; nothing is returned then.
        MissingRecordError
            If the record was evicted meanwhile.
        """

    def read_layer(self, record: Record, layer: int) -> dict[str, TensorBytes]:
        """All tensors of one layer by name; checks and errors as in `read`."""
        wanted = [(info.name, layer) for info in record.layer_tensors(layer)]
        return {name: tensor for (name, _), tensor in self.read(record, wanted).items()}

    def writings(self, keys: Iterable[bytes]) -> dict[bytes, int | None]:
        """By key, which writing of a record stands (`Record.header_checksum`); None for a key without a record.

        For copies in memory, which must not outlive what they were read from.
        """
        found = {key: self.get(key) for key in map(bytes, keys)}
        return {key: None if record is None else record.header_checksum for key, record in found.items()}

    # Use and deletion

    @abstractmethod
    def touch(self, keys: Iterable[bytes], now_s: float | None = None) -> None:
        """Stamp records as used now; keys without a record are passed over. Does nothing on a read-only store."""

    @abstractmethod
    def delete(self, keys: Iterable[bytes]) -> int:
        """Delete records, readable or not; bytes freed inside the store."""

    # Small values with a version

    @abstractmethod
    def get_state(self, space: str, name: str) -> State | None:
        """A state's value and version, or None; raises DamagedError if its bytes are not what was written."""

    @abstractmethod
    def put_state(
        self, space: str, name: str, value: Mapping[str, Any], *, expect: int | Literal["any"] | None
    ) -> int:
        """Write a state if its version is `expect` (None: if there is none); the new version.

        Raises
        ------
        ConflictError
            If another version is there.
        ValueError
            If the value is not strict JSON, or space or name is empty or holds a zero character.
        """

    @abstractmethod
    def list_state(self, space: str) -> list[str]:
        """Names of all states in a space, in order of their UTF-8 bytes."""


def is_same(record: Record, identity: Identity, tenant: str) -> bool:
    """Whether a record found under an identity's key is that identity, for that tenant; warns of other content."""
    if record.digest != identity.digest or record.kind != identity.kind:
        warnings.warn(
            f"entry {record.short_id} holds another content (SHA-256 {record.digest.hex()[:16]}, "
            f"asked for {identity.digest.hex()[:16]}); counted as a miss",
            IdentityWarning,
            stacklevel=4,
        )
        return False
    return record.tenant == tenant


def is_prefix(text: str) -> bool:
    """Whether lower-case text may begin the id of a record."""
    return re.fullmatch("[0-9a-f]{0,32}", text) is not None
