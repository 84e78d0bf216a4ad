"""Orbits that guess what a layer is worth, overspend a budget, or leave halves of themselves behind."""

from __future__ import annotations

import itertools

import pytest
from tiny_models import write_passage

from kamera_cli.bench.cards import CHUNK_SECONDS, FPS, bench_episode, write_episode
from kamera_cli.errors import UsageError
from kamera_cli.jobs.sensitivity import LEAST_FELT, SENSITIVITY, layer_worth
from kamera_cli.settings import DEFAULT_ENERGY
from kamera_cli.tiny import model_path
from kamera_store.errors import NoRoomError
from kamera_store.kvstore import KVStore

NUMBERS = ("1", "2", "3")


@pytest.fixture(scope="module")
def card_file(tmp_path_factory):
    episode = bench_episode(0, 5)
    path = tmp_path_factory.mktemp("cards") / "cards.mp4"
    write_episode(path, episode, 1)
    return path, episode


@pytest.fixture
def cards(open_engine, card_file):
    """An episode of three chunks before the embedded model."""
    engine = open_engine(model=str(model_path()))
    engine.ingest([card_file[0]], fps=FPS, chunk_seconds=CHUNK_SECONDS)
    return engine


def patches_of(engine):
    return list(engine.store.iterate(kind="patch"))


def bytes_of_sets(engine) -> dict[str, int]:
    """By record id, bytes as stored: its own coefficients and its share of the V that its basis holds."""
    records = {record.id: record for record in patches_of(engine)}

    def held(record, side):
        return sum(tensor.raw_bytes for tensor in record.tensors if tensor.name.endswith(side))

    basis_of = {key: records[record.meta.get("basis", key)] for key, record in records.items()}
    sharing = {
        key: sum(other.id == basis.id for other in basis_of.values()) for key, basis in basis_of.items()
    }
    return {
        key: held(record, "_u") + held(basis_of[key], "_v") / sharing[key] for key, record in records.items()
    }


def test_an_orbit_compiled_first_of_all_learns_what_a_layer_is_worth_and_answers(cards, card_file):
    result = cards.compile_patches(kind="orbit")
    state = cards.store.get_state(SENSITIVITY, cards.fingerprint).value
    assert result.learn_ms > 0 and [len(window["chunks"]) for window in state["windows"]] == [3]
    assert max(tensor[0] for layer in state["layers"] for tensor in layer) >= LEAST_FELT
    assert len(result.patches) == 9 and all(
        patch.energy_weighted >= DEFAULT_ENERGY for patch in result.patches
    )
    assert all(patch.split[0] == (0, 0) for patch in result.patches)
    weights = layer_worth(cards, None, {}).layers
    likely = max(range(6), key=lambda layer: weights[layer][0])
    assert all(sum(patch.split[likely]) >= sum(patch.split[1]) for patch in result.patches)
    assert sum(patch.patch_bytes for patch in result.patches) < 0.06 * sum(
        patch.chunk_kv_bytes for patch in result.patches
    )
    two_hop = [question for question in card_file[1].questions if question.hops == 2]
    for order in itertools.permutations(NUMBERS):
        found = cards.query(two_hop[0].text, chunks=order, reuse="patched", compare=True, require_hit=True)
        assert [chunk.used for chunk in found.chunks] == ["canonical", "orbit", "orbit"]
        assert found.answer == two_hop[0].answer and found.compare.kl < 0.05
    assert cards.compile_patches(kind="orbit").learn_ms == 0.0


def test_the_budget_of_an_orbit_holds_for_each_set_with_its_share_of_v_as_stored(cards):
    before = 0.0
    for budget in (6_000, "1%", "2%"):
        result = cards.compile_patches(kind="orbit", budget=str(budget))
        kv = {patch.id: patch.chunk_kv_bytes for patch in result.patches}
        stored = bytes_of_sets(cards)
        assert len(stored) == 9
        for key, size in stored.items():
            assert 0 < size <= (budget if isinstance(budget, int) else 0.01 * int(budget[0]) * kv[key])
        energy = min(patch.energy_weighted for patch in result.patches)
        assert energy > before
        before = energy
    assert {patch.outcome for patch in cards.compile_patches(kind="orbit", budget="2%").patches} == {"found"}


def test_a_budget_without_room_in_an_orbit_is_refused_before_anything_is_learnt(cards):
    with pytest.raises(
        UsageError, match=r"chunk 1: the budget is 150 bytes, one direction of a patch takes 181"
    ):
        cards.compile_patches(kind="orbit", budget="150")
    assert not patches_of(cards) and cards.store.get_state(SENSITIVITY, cards.fingerprint) is None


def test_pairs_learn_from_all_chunks_and_keep_a_budget(cards):
    result = cards.compile_patches(kind="pair", budget="1%")
    state = cards.store.get_state(SENSITIVITY, cards.fingerprint).value
    assert result.learn_ms > 0 and [len(window["chunks"]) for window in state["windows"]] == [3]
    assert all(0 < patch.patch_bytes <= 0.01 * patch.chunk_kv_bytes for patch in result.patches)
    assert all(patch.energy_weighted is not None for patch in result.patches)


def test_a_removal_goes_by_worth_and_budget(cards):
    cards.compile_patches()
    cards.evict(["1"])
    result = cards.compile_patches(kind="removal", budget="1%")
    assert result.patches and all(
        patch.patch_bytes <= 0.01 * patch.chunk_kv_bytes for patch in result.patches
    )
    assert all(patch.energy_weighted is not None for patch in result.patches)


@pytest.fixture
def texts(open_engine, tmp_path):
    engine = open_engine("qwen2")
    engine.ingest([write_passage(tmp_path / f"{index}.txt", 12, index) for index in range(4)])
    return engine


def test_the_patches_of_a_chunk_are_written_in_one_transaction(texts, monkeypatch):
    calls = []
    whole = KVStore.put_all

    def counted(store, items, **options):
        calls.append(len(items))
        return whole(store, items, **options)

    monkeypatch.setattr(KVStore, "put_all", counted)
    texts.compile_patches(["1", "2", "3"], kind="orbit")
    assert calls == [3, 3, 3]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_orbit_that_a_full_store_cut_short_is_read_in_whole_parts_only(texts, monkeypatch, written):
    """An older orbit stands; the room ends after some patches of the first chunk were written over it."""
    texts.compile_patches(["1", "2", "3"], kind="orbit", rank=3)
    before = {record.id: record.meta["version"] for record in patches_of(texts)}

    def short(store, items, *, replace):
        for item in items[:written]:
            store.put(**item, replace=replace)
        raise NoRoomError(1, 0)

    with monkeypatch.context() as patched:
        patched.setattr(KVStore, "put_all", short)
        with pytest.raises(NoRoomError):
            texts.compile_patches(["1", "2", "3"], kind="orbit", rank=5)
    records = {record.id: record for record in patches_of(texts)}
    assert len(records) == 9 and sum(records[key].meta["version"] != before[key] for key in before) == written
    library, entries = texts.library, texts.window().entries[:3]
    for record in records.values():
        identities = {entry.chunk: library.find_chunk(entry) for entry in entries}
        chunk, *others = (identities[key] for key in (record.meta["chunk"], *record.meta["antecedents"]))
        found = library.find_orbit(identity(chunk), [identity(other) for other in others])
        assert len({part.meta["version"] for part in found}) <= 1
        if found:
            ranks = [
                library.patch_layers(found[0])[layer].rotary.rank
                for layer in range(len(found[0].meta["ranks"]))
            ]
            assert all(most >= rank for most, (rank, _) in zip(ranks, found[-1].meta["split"], strict=True))
    for order in itertools.permutations(NUMBERS):
        result = texts.query("why", chunks=order, reuse="auto")
        assert len(result.chunks) == 3
    texts.compile_patches(["1", "2", "3"], kind="orbit", rank=5)
    assert (
        len({record.meta["version"] for record in patches_of(texts) if record.meta["kind"] == "orbit"}) == 3
    )


def identity(record):
    from kamera_store.keys import Identity

    return Identity("chunk", record.key, record.digest)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_purged_chunk_takes_coefficients_along_whose_basis_named_it(texts, number):
    texts.compile_patches(["1", "2", "3"], kind="orbit")
    texts.compile_patches(["1", "2", "4"])
    before = {record.id: record.stored_bytes for record in texts.store.iterate()}
    foretold = texts.evict([number], purge=True, dry_run=True)
    result = texts.evict([number], purge=True)
    left = {record.id: record for record in texts.store.iterate()}
    assert result.freed_bytes > 0
    assert foretold.freed_bytes == sum(size for key, size in before.items() if key not in left)
    # An orbit of three has one set of two before each chunk, which holds V: each set of the others goes with it.
    assert not [
        record for record in left.values() if record.kind == "patch" and record.meta["kind"] == "orbit"
    ]
    assert all(record.meta.get("basis", record.id) in left for record in left.values())


def test_a_purge_leaves_an_orbit_alone_that_does_not_name_the_chunk(texts):
    texts.compile_patches(["1", "2", "3"], kind="orbit")
    texts.evict(["4"], purge=True)
    assert len(patches_of(texts)) == 9
