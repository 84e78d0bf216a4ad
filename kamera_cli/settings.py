"""Frozen settings: a flag beats the environment, the environment beats the default. Imports no torch."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

from kamera_cli.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]
Attention = Literal["auto", "flash", "sdpa"]

DEFAULT_MODEL = "kamera-tiny"
ENVIRONMENT = {
    "KAMERA_STORE": "store",
    "KAMERA_MODEL": "model",
    "KAMERA_TENANT": "tenant",
    "KAMERA_QUOTA": "quota_bytes",
}
"""The environment variables that are read, and the field each one sets."""

MIN_QUOTA_BYTES = 1 << 20
"""Less than this no store can work with."""

MAX_NAME_BYTES = 200
"""Of a tenant or a window."""

DEFAULT_ENERGY = 0.999
"""Share of a patch's worth that is captured unless told otherwise. On the embedded model one answer of 9,878 was then
further than 0.05 nats from its re-prefill; at 0.995 six were, at 0.99 nine, at 0.55 and 0.41 times the bytes."""

_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_SECOND_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True)
class Settings:
    """Everything that the engine and the store need to know before a command runs.

    Attributes
    ----------
    store : Path
        Folder of the store; the platform's per-user data folder unless said otherwise.
    model : str
        A checkpoint folder, a repository name in the local Hugging Face cache, or ``kamera-tiny``.
    tenant : str
        Salt of every key; entries of another tenant are never found.
    dtype : {"auto", "bf16", "fp16", "fp32"}
        ``auto`` is bf16 on a GPU and fp32 on a CPU.
    quota_bytes : int or None
        Bytes that the store may hold; None keeps the quota that the store has.
    hot_bytes : int
        Bytes of KV, factors and embeddings that an engine keeps in memory for the next call. 0 keeps none: a command
        is one process that reads each chunk once, so a copy would serve nobody.
    rehash : bool
        Hash the weight files again although size and time have not changed.
    trust_remote_code : bool
        Let a checkpoint bring its own Python files.
    """

    store: Path = field(default_factory=lambda: default_store())
    model: str = DEFAULT_MODEL
    tenant: str = "default"
    device: Device = "auto"
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    quota_bytes: int | None = None
    hot_bytes: int = 0
    rehash: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not str(self.store):
            raise UsageError("the store's path is empty; give --store a folder, or leave it out")
        object.__setattr__(self, "store", Path(self.store).expanduser())
        checked_name("tenant", self.tenant)
        if not self.model.strip():
            raise UsageError("the model's name is empty; give --model a folder or a name, or leave it out")
        for name, choices in (("device", Device), ("dtype", Dtype), ("attention", Attention)):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise UsageError(f"--{name} {getattr(self, name)} is not supported (supported: {known})")
        if self.quota_bytes is not None and self.quota_bytes < MIN_QUOTA_BYTES:
            raise UsageError(
                f"a quota of {self.quota_bytes} bytes is too small for a store; give at least 1MiB"
            )
        if self.hot_bytes < 0:
            raise UsageError(f"hot_bytes {self.hot_bytes}: must not be negative")

    @classmethod
    def from_environment(cls, *, environ: Mapping[str, str] | None = None, **flags: object) -> Settings:
        """Merge flags (None: not given) over ``environ`` over the defaults, as the command line does.

        Parameters
        ----------
        environ : mapping, optional
            Defaults to ``os.environ``. An empty value counts as not set.
        **flags
            Fields of this class; ``store`` may be a string and ``quota_bytes`` text such as ``10GB``.

        Raises
        ------
        UsageError
            On a ``KAMERA_*`` variable that nothing reads, or on a value that cannot be used.
        """
        environ = os.environ if environ is None else environ
        check_environment(environ)
        known = {field.name for field in fields(cls)}
        assert flags.keys() <= known, f"no such setting: {sorted(flags.keys() - known)}"
        values: dict[str, object] = {
            field: environ[variable] for variable, field in ENVIRONMENT.items() if environ.get(variable)
        }
        values |= {name: value for name, value in flags.items() if value is not None}

        quota = values.get("quota_bytes")
        if isinstance(quota, str):
            values["quota_bytes"] = parse_bytes(quota)
        return cls(**values)  # type: ignore[arg-type]


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse a ``KAMERA_*`` variable that nothing reads: a misspelt one would be ignored without a word."""
    for variable in sorted(environ):
        if variable.startswith("KAMERA_") and variable not in ENVIRONMENT:
            close = difflib.get_close_matches(variable, ENVIRONMENT, n=1)
            meant = f"did you mean {close[0]}?" if close else "read are " + ", ".join(ENVIRONMENT)
            raise UsageError(f"the environment variable {variable} means nothing to kamera; {meant}")


def parse_bytes(text: str) -> int:
    """Bytes of ``10GB`` (powers of 1000), ``512MiB`` (powers of 1024) or a plain number.

    Raises
    ------
    UsageError
        If the text is no size, or uses a bare letter, which people read both ways.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = match.group(2).upper() if match else ""
    if match and unit in _BYTE_UNITS:
        return (
            int(float(match.group(1)) * _BYTE_UNITS[unit])
            if "." in match.group(1)
            else (int(match.group(1)) * _BYTE_UNITS[unit])
        )
    if match and unit in set("KMGTP"):
        raise UsageError(
            f"the size {text!r} can be read two ways; write {match.group(1)}{unit}B or {match.group(1)}{unit}iB"
        )
    raise UsageError(f"{text!r} is not a size; write for instance 10GB, 512MiB or a number of bytes")


def parse_duration_s(text: str) -> float:
    """Seconds of ``7d``, ``12h``, ``30m``, ``45s`` or ``2w``.

    Raises
    ------
    UsageError
        If the text is no duration or has no unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text, re.ASCII)
    if match is None:
        raise UsageError(f"{text!r} is not a duration; write for instance 7d, 12h, 30m or 45s")
    return float(match.group(1)) * _SECOND_UNITS[match.group(2)]


def default_store() -> Path:
    """The platform's per-user data folder."""
    import platformdirs

    return platformdirs.user_data_path("kamera", appauthor=False) / "store"


def checked_name(what: str, name: str) -> str:
    """``name``, if a tenant or a window can be called so.

    Raises
    ------
    UsageError
        If it is empty, longer than `MAX_NAME_BYTES` in UTF-8, or holds ``/``, control characters or bad UTF-8.
    """
    if not name or "/" in name or not name.isprintable():
        raise UsageError(
            f"{name!r} cannot name a {what}: it must not be empty and hold neither '/' nor control characters"
        )
    if len(name.encode("utf-8")) > MAX_NAME_BYTES:
        raise UsageError(f"the name of the {what} is longer than {MAX_NAME_BYTES} bytes; give a shorter one")
    return name
