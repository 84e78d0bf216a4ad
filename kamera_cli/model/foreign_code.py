"""Python code that comes with a checkpoint: found from its JSON files, refused without consent, digested with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from kamera_cli.errors import RefusedError
from kamera_store.format.keys import file_sha256

FLAG = "--trust-remote-code"
_FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
)
_REFERENCE = re.compile(r"^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$")


def refuse_foreign_code(label: str, folder: Path, *, trusted: bool, required: bool) -> None:
    """Refuse code that the user did not allow, or whose revision cannot be pinned.

    Parameters
    ----------
    trusted : bool
        The user said ``--trust-remote-code``.
    required : bool
        The architecture runs its own code: a checkpoint without any is incomplete.

    Raises
    ------
    RefusedError
        Code without consent; code of another repository; a reference to a file that is not there; a JSON file that is
        damaged.
    """
    references = list(_references(label, folder))
    if not references and required:
        raise RefusedError(f"model {label} runs its own Python code, and its config.json has no auto_map")
    for source, reference in references:
        if not trusted:
            other = (
                "" if required else ", or take auto_map out of that file and use the classes of transformers"
            )
            raise RefusedError(
                f"model {label} runs its own Python code (auto_map in {source}); allow it with {FLAG}{other}"
            )
        if "--" in reference:
            raise RefusedError(
                f"model {label}: auto_map in {source} names code of another repository ({reference}), whose revision "
                "cannot be pinned; copy the code into the folder"
            )
        if not _REFERENCE.match(reference):
            raise RefusedError(
                f"model {label}: auto_map in {source} names {reference!r}, no class of a module"
            )
        module = reference.split(".")[0]
        if not (folder / f"{module}.py").is_file():
            raise RefusedError(
                f"model {label}: auto_map in {source} names {reference}, there is no {module}.py"
            )


def code_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every Python file below a folder by its path in there: the revision of the code."""
    return {file.relative_to(folder).as_posix(): file_sha256(file) for file in sorted(folder.rglob("*.py"))}


def _references(label: str, folder: Path) -> Iterator[tuple[str, str]]:
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            parsed = json.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise RefusedError(f"model {label}: {name} is not JSON ({error})") from error
        for reference in _in_maps(parsed):
            yield name, reference


def _in_maps(value: object) -> Iterator[str]:
    """References of every ``auto_map`` in a JSON value, however deep: processors keep their parts inside."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key == "auto_map":
            yield from _strings(item)
        else:
            yield from _in_maps(item)
    for item in value if isinstance(value, list) else ():
        yield from _in_maps(item)


def _strings(value: object) -> Iterator[str]:
    """Strings in an ``auto_map``: names, or lists of a slow and a fast class where null stands for none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
    elif value is not None:
        yield repr(value)
