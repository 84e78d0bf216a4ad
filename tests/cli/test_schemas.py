"""The keys of every JSON result. Keys only grow: one that scripts read must not go, nor be called otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_fakes import FakeEngine, Ran, query_result

from kamera_cli.app import run

Cli = Callable[..., Ran]

ENTRY = "id number name num_tokens conditioned_on"
FILE = "file_bytes free_inside_bytes"
PROMISED = {
    "ingest": (
        "window dry_run raw_bytes stored_bytes total_ms counts.encoded counts.found counts.planned failures "
        "sources.path sources.kind sources.from_index sources.notes sources.decode_ms sources.encode_ms "
        "sources.prefill_ms sources.write_ms sources.chunks.id sources.chunks.number sources.chunks.name "
        "sources.chunks.outcome sources.chunks.num_tokens sources.chunks.raw_bytes sources.chunks.stored_bytes "
        "sources.chunks.start_ms sources.chunks.end_ms"
    ),
    "compile-patches": (
        "window kind prefill_ms total_ms patch_bytes patches.id patches.chunk patches.chunk_number patches.antecedents "
        "patches.outcome patches.ranks patches.energy patches.kl patches.kl_blind patches.patch_bytes "
        "patches.chunk_kv_bytes patches.form_ms survivors kl_kept kl_removed measure_ms form_ratio"
    ),
    "query": (
        "question answer window reuse fallback model device dtype attention ttft_ms tpot_ms total_ms stages.lookup "
        "stages.read stages.decompress stages.transfer stages.assemble stages.prefill tokens.reused tokens.prefilled "
        "tokens.new why_not patches_kept warnings chunks.id chunks.number chunks.name chunks.used chunks.patch "
        "chunks.rank chunks.energy chunks.kl chunks.bytes_read chunks.num_tokens chunks.position chunks.why_not "
        "compare.ttft_ms compare.kl compare.same_answer compare.answer compare.vision_ms compare.prefill_ms "
        "compare.decode_ms compare.full_reencode placed chunks.pairs chunks.hot_bytes"
    ),
    "recall": "window patched cascade vision_calls total_ms repaired repaired_patches "
    + " ".join(f"{part}.{key}" for part in ("recalled", "chunks") for key in ENTRY.split()),
    "evict": "window dry_run purged freed_bytes "
    + " ".join(f"{part}.{key}" for part in ("evicted", "chunks") for key in ENTRY.split()),
    "ls": "tenant windows.name windows.fingerprint windows.chunks.state windows.chunks.num_patches "
    "windows.chunks.stored_bytes windows.chunks.kind "
    + " ".join(f"windows.chunks.{key}" for key in ENTRY.split()),
    "show": "id kind digest tenant unit created_ms cost_ms raw_bytes stored_bytes num_layers meta.name patches "
    "tensors.name tensors.layer tensors.dtype tensors.shape tensors.raw_bytes tensors.stored_bytes tensors.codec "
    "tensors.checksum",
    "stats": f"store count raw_bytes stored_bytes kinds.chunk.count units used_bytes quota_bytes map_bytes {FILE}",
    "verify": "ok num_records num_bytes damaged",
    "compact": "before_bytes after_bytes",
    "models": "architectures.model_type architectures.name architectures.family architectures.verified",
}


def paths(value: object, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys; the items of a list share theirs."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{prefix}{key}"
            yield from paths(item, f"{prefix}{key}.")
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, prefix)


def check(command: str, document: dict) -> None:
    assert document["schema"] == f"kamera.{command}.v1"
    missing = set(PROMISED[command].split()) - set(paths(document))
    assert not missing, f"{command}: {sorted(missing)}"
    for path in paths(document):
        key = path.rsplit(".", 1)[-1]
        assert not key.endswith("_s"), f"{command}: {path} is in seconds, JSON has times in ms"


@pytest.mark.parametrize(
    "arguments", [["ingest", "a.mp4"], ["compile-patches"], ["query", "x"], ["recall", "1"]]
)
def test_results_of_the_engine_keep_their_keys(cli: Cli, engine: FakeEngine, arguments: list[str]) -> None:
    engine.answers["query"] = query_result(compare=True)
    check(arguments[0], cli(*arguments, "--json").json)


def test_evict_keeps_its_keys(cli: Cli, engine: FakeEngine) -> None:
    document = cli("evict", "1", "--json").json
    check("evict", document)


@pytest.fixture(scope="module")
def one_note(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    (folder / "note.txt").write_text("the letter of the card\n", encoding="utf-8")
    store = folder / "store"
    assert run(["--store", str(store), "--device", "cpu", "-q", "ingest", str(folder / "note.txt")]) == 0
    return store


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["show", "1"], ["stats"], ["verify"], ["compact"], ["models"], ["ls", "--all"]],
    ids=" ".join,
)
def test_results_of_the_store_keep_their_keys(
    cli: Cli, one_note: Path, tmp_path: Path, arguments: list[str]
) -> None:
    shutil.copytree(one_note, tmp_path / "store")
    check(arguments[0], cli(*arguments, "--json").json)


def test_bytes_are_whole_numbers(cli: Cli, one_note: Path, tmp_path: Path) -> None:
    shutil.copytree(one_note, tmp_path / "store")

    def sizes(value: object) -> Iterator[object]:
        if isinstance(value, dict):
            yield from (item for key, item in value.items() if key.endswith("_bytes"))
            for item in value.values():
                yield from sizes(item)
        elif isinstance(value, list):
            for item in value:
                yield from sizes(item)

    for arguments in (["ls"], ["show", "1"], ["stats"], ["compact"]):
        found = [size for size in sizes(json.loads(cli(*arguments, "--json").out)) if size is not None]
        assert found
        assert all(type(size) is int for size in found), arguments
