"""A checkpoint's weight files: which ones they are, what their headers say, whether that fits ``config.json``.

safetensors reads the headers, and nothing more is read, so that a contradiction is found before torch is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kamera_cli.errors import RefusedError
from kamera_cli.model.config_rules import head_dim

_LAYER = re.compile(r"^(?P<prefix>.*?)(?:^|\.)(?:layers|blocks)\.(?P<layer>\d+)\.(?P<rest>.+)$")
"""transformers 5.24 writes the layers of Kimi K2.5 as blocks, and reads both."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARDS_OF_RANKS = re.compile(
    r"model-rank-\d+-part-\d+\.|mp_rank_\d+|\.tp[-_]?\d+\.|^consolidated\.\d+\.|^model\d+-mp\d+\.|^rank[-_]?\d+\."
)
_NOT_LANGUAGE = re.compile(r"vis|tower|aligner|projector|encoder|sam")
_PROJECTION = re.compile(r"^(?:self_attn|mlp|mlp\.(?:shared_)?experts(?:\.\d+)?)\.\w+_proj\w*(?:\.weight)?$")
_COMPUTED = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor; ``dtype`` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def weight_files(label: str, folder: Path) -> tuple[Path, ...]:
    """Files that the Auto classes would read, in their order of preference: one file, else those of the index.

    Raises
    ------
    RefusedError
        None, a missing one, an index that is damaged or leads out of the folder, shards of a tensor-parallel run.
    """
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    index = folder / _INDEX
    names = _indexed(label, index) if index.is_file() else ()
    shards = sorted(
        name
        for name in (*names, *(entry.name for entry in folder.iterdir()))
        if _SHARDS_OF_RANKS.search(name)
    )
    if shards and (not names or any(name in names for name in shards)):
        raise RefusedError(
            f"model {label}: {shards[0]} is a shard of a tensor-parallel run, which holds part of each weight; "
            "save the model whole"
        )
    if not names:
        raise RefusedError(f"model {label}: no {_SINGLE} in {folder} (pickled weights are not read)")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise RefusedError(
            f"model {label}: {len(missing)} of {len(names)} weight files missing, first {missing[0]}"
        )
    return tuple(folder / name for name in names)


def _indexed(label: str, index: Path) -> tuple[str, ...]:
    places = _weight_map(label, index)
    for name in places.values():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or path.suffix != ".safetensors":
            raise RefusedError(
                f"model {label}: {index.name} lists {name!r}, no safetensors file of this folder"
            )
    return tuple(sorted(set(places.values())))


def _weight_map(label: str, index: Path) -> dict[str, str]:
    try:
        parsed = json.loads(index.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RefusedError(f"model {label}: {index.name} is not JSON ({error})") from error
    places = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not (isinstance(places, dict) and places and all(isinstance(name, str) for name in places.values())):
        raise RefusedError(f"model {label}: {index.name} has no weight_map from weights to files")
    return places


def read_headers(label: str, folder: Path, files: Iterable[Path]) -> dict[str, TensorEntry]:
    """What the weight files of a folder hold, by name of the weight.

    Raises
    ------
    RefusedError
        A header is damaged, a file is cut short, or a weight of the index is not in its file.
    """
    headers = {file.relative_to(folder).as_posix(): _header(label, file) for file in files}
    if list(headers) != [_SINGLE]:
        for name, place in _weight_map(label, folder / _INDEX).items():
            if name not in headers[PurePosixPath(place).as_posix()]:
                raise RefusedError(f"model {label}: weight {name} is not in {place}, where {_INDEX} puts it")
    return {name: entry for entries in headers.values() for name, entry in entries.items()}


def _header(label: str, file: Path) -> dict[str, TensorEntry]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorEntry(name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in parts.items()
            }
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        if "unknown variant" in reason:
            raise RefusedError(
                f"model {label}: a weight of {file.name} has an unknown dtype ({reason})"
            ) from error
        raise RefusedError(f"model {label}: weight file {file.name} is damaged ({reason})") from error


def refuse_dtypes(label: str, tensors: Mapping[str, TensorEntry], *, quantised: bool) -> None:
    """Refuse weights whose numbers cannot be computed with as they stand.

    Norms, routers and their corrections are often kept in fp32 beside bf16 matrices and may differ; the projections of
    the decoder layers may not, since such a file is a failed merge or conversion.

    Parameters
    ----------
    quantised : bool
        ``config.json`` has a quantization_config, which says what integer and fp8 weights stand for.
    """
    if quantised:
        return
    first: TensorEntry | None = None
    for name, entry in sorted(tensors.items()):
        if len(entry.shape) >= 2 and entry.dtype not in _COMPUTED:
            raise RefusedError(
                f"model {label}: weight {name} is {entry.dtype} and config.json has no quantization_config"
            )
        layer = decoder_layer(name)
        if layer is None or len(entry.shape) < 2 or not _PROJECTION.match(layer[1]):
            continue
        first = first or entry
        if entry.dtype != first.dtype:
            raise RefusedError(
                f"model {label}: mixed dtypes, {first.name} is {first.dtype} and {name} is {entry.dtype}"
            )


def expected_shapes(text: Mapping, family: str) -> dict[str, tuple[int | None, ...]]:
    """Shapes of a layer's attention weights by ``config.json``, by name in the layer; None where it does not say.

    Parameters
    ----------
    text : mapping
        Fields of the language model, sizes already checked to be whole numbers.
    family : {"GQA/MHA", "MLA"}
    """
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if family == "MLA":
        rank, rotary = text["kv_lora_rank"], text["qk_rope_head_dim"]
        return {
            "self_attn.kv_a_proj_with_mqa.weight": (rank + rotary, hidden),
            "self_attn.kv_a_layernorm.weight": (rank,),
            "self_attn.kv_b_proj.weight": (
                _product(heads, text["qk_nope_head_dim"] + text["v_head_dim"]),
                rank,
            ),
        }
    width = head_dim(text)
    groups = text.get("num_key_value_heads", 0)
    groups = heads if groups is None else groups
    return {
        "self_attn.q_proj.weight": (_product(heads, width), hidden),
        "self_attn.k_proj.weight": (_product(groups, width), hidden),
        "self_attn.v_proj.weight": (_product(groups, width), hidden),
    }


def _product(left: int | None, right: int | None) -> int | None:
    return left * right if left and right else None


def refuse_shapes(
    label: str,
    tensors: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int | None, ...]],
    text: Mapping,
) -> None:
    """Refuse weights that contradict ``config.json``: layers too few or too many, attention of another shape.

    Parameters
    ----------
    expected : mapping of str to tuple of (int or None)
        From `expected_shapes`.
    text : mapping
        Fields of the language model; layers that only predict further tokens may follow its own.
    """
    layers: dict[int, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        found = decoder_layer(name)
        if found:
            layers.setdefault(found[0], {})[found[1]] = entry
    num_layers = text.get("num_hidden_layers") or len(layers)
    more = text.get("num_nextn_predict_layers", text.get("num_mtp_layers"))
    allowed = num_layers + (more if type(more) is int else 0)
    if not set(range(num_layers)) <= set(layers) <= set(range(allowed)):
        raise RefusedError(
            f"model {label}: config.json contradicts the weights: num_hidden_layers is {num_layers}, the weights have "
            f"{len(layers)} layers"
        )
    for layer in range(num_layers):
        for name, shape in expected.items():
            stored = layers[layer].get(name)
            if stored is None:
                raise RefusedError(f"model {label}: weights missing, first layers.{layer}.{name}")
            fits = len(stored.shape) == len(shape) and all(
                want in (None, have) for want, have in zip(shape, stored.shape, strict=True)
            )
            if not fits:
                raise RefusedError(
                    f"model {label}: config.json contradicts the weights: {stored.name} is {list(stored.shape)}, "
                    f"by the config it is {list(shape)}"
                )


def decoder_layer(name: str) -> tuple[int, str] | None:
    """Index of the decoder layer that a weight belongs to and its name in there; None for towers, norms and heads."""
    found = _LAYER.match(name)
    if found is None or _NOT_LANGUAGE.search(found["prefix"]):
        return None
    return int(found["layer"]), found["rest"]
