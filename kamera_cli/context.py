"""What every job is handed: the store, the model and what is known of both, each made once and when first needed.

Importing this module loads no torch; the model is loaded by the first use of `Context.runner`.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

from kamera_cli.errors import RefusedError, UsageError
from kamera_cli.lazy import Lazy, once
from kamera_cli.model.checkpoint import (
    Checkpoint,
    Contents,
    dtype_name_for,
    fingerprint,
    open_checkpoint,
    positions_memory,
    read_contents,
)
from kamera_cli.results import Progress, WindowView
from kamera_cli.settings import Settings
from kamera_store.format.keys import Identity
from kamera_store.kvstore import KVStore

if TYPE_CHECKING:
    from kamera_cli.hot import HotCache
    from kamera_cli.library import Library
    from kamera_cli.model.runner import ModelRunner
    from kamera_cli.model.self_test import SelfTest

POSITIONS, SELFTEST, NO_GPU = "positions", "selftest", "no-gpu"
"""State spaces of the store: what position functions answered, which fingerprints passed the self-test, and on which
hosts it was said that there is no GPU."""


class Context(Lazy):
    """One store and one model.

    Parameters
    ----------
    settings : Settings
    on_progress : callable, optional
        Receives a `Progress` after each step of a long job.
    on_warning : callable, optional
        Receives one line at a time that a person should see.
    runner : ModelRunner, optional
        The model of ``settings.model``, loaded already.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        on_warning: Callable[[str], None] | None = None,
        runner: ModelRunner | None = None,
    ) -> None:
        super().__init__({} if runner is None else {"runner": runner})
        self.settings = settings
        self.progress = on_progress or (lambda _step: None)
        self.warn = on_warning or (lambda _line: None)
        self._numbers: dict[bytes, int] = {}

    def close(self) -> None:
        """Release the store; it is opened again by its next use."""
        hot = self.made("hot")
        store, _library = self.forget("store", "library")
        if hot is not None:
            hot.clear()
        if store is not None:
            store.close()

    def numbered(self, view: WindowView) -> Context:
        """The same context, which names chunks by their number in a window."""
        other = copy.copy(self)
        other._numbers = {
            bytes.fromhex(entry.chunk): entry.number for entry in (*view.entries, *view.evicted)
        }
        return other

    def number(self, key: bytes) -> int:
        """Number of a chunk in the window at hand, by its key; 0 where that does not know it."""
        return self._numbers.get(key, 0)

    def label(self, chunk: Identity) -> str:
        """What a message calls a chunk: its number in the window at hand, or else its short id."""
        return str(self._numbers.get(chunk.key, chunk.short_id))

    @property
    def tenant(self) -> str:
        """Whose chunks and windows are seen."""
        return self.settings.tenant

    @once
    def store(self) -> KVStore:
        """The store at ``settings.store``, created when it is not there."""
        return KVStore.open(self.settings.store, quota_bytes=self.settings.quota_bytes)

    @once
    def checkpoint(self) -> Checkpoint:
        """The model's folder, checked but not loaded."""
        return open_checkpoint(self.settings.model, trust_remote_code=self.settings.trust_remote_code)

    @once
    def contents(self) -> Contents:
        """Digests of the model's files, taken once: loading and fingerprint go by the same ones."""
        return self._read_contents(self.checkpoint, rehash=self.settings.rehash)

    def _read_contents(self, checkpoint: Checkpoint, *, rehash: bool) -> Contents:
        return read_contents(
            checkpoint,
            self.store,
            rehash=rehash,
            on_hash=lambda name: self.progress(Progress(f"hashing {name}", 0, None, "files")),
        )

    @once
    def runner(self) -> ModelRunner:
        """The loaded model.

        Raises
        ------
        RefusedError
            It cannot be loaded, or its files changed after their digests were taken.
        """
        from kamera_cli.model.loading import load
        from kamera_cli.model.runner import ModelRunner

        settings, taken, label = self.settings, self.contents, self.checkpoint.label
        self.progress(Progress(f"loading {label}", 0, 1, "models"))
        runner = ModelRunner(
            load(
                self.checkpoint,
                device=settings.device,
                dtype=settings.dtype,
                attention=settings.attention,
                trust_remote_code=settings.trust_remote_code,
            )
        )
        again = open_checkpoint(settings.model, trust_remote_code=settings.trust_remote_code)
        if self._read_contents(again, rehash=False) != taken:
            raise RefusedError(f"model {again.label} changed while it was in use; run the command again")
        if settings.device == "auto" and runner.device.type == "cpu":
            self._warn_of_the_cpu_once()
        self.progress(Progress(f"loading {label}", 1, 1, "models", f"on the {runner.device.type.upper()}"))
        return runner

    def _warn_of_the_cpu_once(self) -> None:
        """The first time that a model is loaded here for this store; the receipt of each query names the device."""
        host = platform.node()[:200]
        if self.store.get_state(NO_GPU, host) is None:
            self.warn(
                "no GPU found: running on the CPU, expect it to be slow (said once; -v names the device)"
            )
            self.store.put_state(NO_GPU, host, {"said": True}, expect="any")

    @once
    def fingerprint(self) -> str:
        """Model fingerprint. Needs the model only when its position function was never probed here."""
        memory = positions_memory(self.checkpoint)
        known = self.store.get_state(POSITIONS, memory)
        positions = known.value["probe"] if known else self._probe_positions(memory)
        return fingerprint(self.checkpoint, self.contents, positions=positions, dtype=self.dtype_name)

    def _probe_positions(self, memory: str) -> str:
        found = self.runner.probe_positions()
        self.store.put_state(POSITIONS, memory, {"probe": found}, expect="any")
        return found

    @once
    def library(self) -> Library:
        """Chunks and patches of this tenant and model in the store; made without loading the model."""
        from kamera_cli.library import Library
        from kamera_cli.model.families import TENSOR_NAMES
        from kamera_cli.model.loading import device_of

        names = TENSOR_NAMES[self.checkpoint.architecture.family]
        return Library(
            self.store, self.tenant, self.fingerprint, device_of(self.settings.device), names, self.hot
        )

    @once
    def hot(self) -> HotCache | None:
        """What is kept in memory of chunks and patches that were used; None with ``Settings.hot_bytes`` 0."""
        from kamera_cli.hot import HotCache

        return HotCache(self.settings.hot_bytes) if self.settings.hot_bytes else None

    def drop_deleted(self) -> None:
        """Forget in memory what the store no longer holds."""
        if (hot := self.made("hot")) is not None:
            hot.check(self.store)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is in memory."""
        return self.made("runner") is not None

    @property
    def dtype_name(self) -> str:
        """Compute dtype without loading torch where the answer is plain; the loaded model's own otherwise."""
        plain = None if self.is_loaded else dtype_name_for(self.settings.device, self.settings.dtype)
        return plain or str(self.runner.dtype).removeprefix("torch.")

    @property
    def vision_calls(self) -> int:
        """Forwards of the vision tower so far; none while the model is not loaded."""
        return self.runner.vision_calls if self.is_loaded else 0

    def ensure_self_tested(self) -> None:
        """Run the self-test once per fingerprint, before anything is written for it.

        Raises
        ------
        RefusedError
            A check failed: the captured KV is not what this model's own cache holds.
        """
        from kamera_cli.model.self_test import require

        if self.store.get_state(SELFTEST, self.fingerprint) is None:
            require(self.self_test(), self.checkpoint.label)
            self.store.put_state(SELFTEST, self.fingerprint, {"passed": True}, expect="any")

    def self_test(self) -> SelfTest:
        """Compare capture, relocation and positions with the model's own."""
        from kamera_cli.model.self_test import self_test

        return self_test(self.runner)

    def refuse_other_model(
        self,
        window: WindowView,
        advice: str = "use that model, --dtype and release of transformers, or ingest again into another window",
    ) -> None:
        """Refuse a window whose chunks were made by another model, by weights, config, tokenizer, dtype or positions.

        Parameters
        ----------
        advice : str
            What to do about it.

        Raises
        ------
        RefusedError
        """
        if window.fingerprint != self.fingerprint:
            raise RefusedError(
                f"window {window.name!r} holds chunks of another model (its fingerprint {window.fingerprint[:10]}, "
                f"{self.settings.model} as {self.dtype_name} has {self.fingerprint[:10]}); {advice}"
            )

    def require_context(self, num_positions: int, what: str) -> None:
        """Refuse a prompt that is longer than the model's context.

        Raises
        ------
        UsageError
        """
        if num_positions > self.runner.max_tokens:
            raise UsageError(
                f"{what}: {num_positions} tokens, the context of {self.checkpoint.label} is {self.runner.max_tokens}"
            )
