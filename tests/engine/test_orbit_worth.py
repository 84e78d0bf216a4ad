"""Orbits that guess what a layer is worth, overspend a budget, or cost a transaction for each set."""

from __future__ import annotations

import itertools

import pytest
from engine_setups import open_on_cards, write_cards
from tiny_models import write_passage

from kamera_cli.errors import UsageError
from kamera_cli.patches.worth import LEAST_FELT, SENSITIVITY, known_worth
from kamera_cli.settings import DEFAULT_ENERGY
from kamera_store.kvstore import KVStore

NUMBERS = ("1", "2", "3")


@pytest.fixture(scope="module")
def card_file(tmp_path_factory):
    return write_cards(tmp_path_factory.mktemp("cards"), 0)


@pytest.fixture
def cards(open_engine, card_file):
    """An episode of three chunks before the embedded model."""
    return open_on_cards(open_engine, card_file[0])


def patches_of(engine):
    return list(engine.store.iterate(kind="patch"))


def test_an_orbit_compiled_first_of_all_learns_what_a_layer_is_worth_and_answers(cards, card_file):
    result = cards.compile_patches(kind="orbit")
    state = cards.store.get_state(SENSITIVITY, cards.fingerprint).value
    assert result.learn_ms > 0 and [len(window["chunks"]) for window in state["windows"]] == [3]
    assert max(tensor[0] for layer in state["layers"] for tensor in layer) >= LEAST_FELT
    assert len(result.patches) == 9 and all(
        patch.energy_weighted >= DEFAULT_ENERGY - 5e-4 for patch in result.patches
    )
    assert all(patch.split[0] == (0, 0) for patch in result.patches)
    weights = known_worth(cards.context).layers
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


def test_the_budget_of_an_orbit_holds_for_each_set_as_stored(cards):
    before = 0.0
    for budget in (6_000, "1%", "2%"):
        result = cards.compile_patches(kind="orbit", budget=str(budget))
        kv = {patch.id: patch.chunk_kv_bytes for patch in result.patches}
        stored = {record.id: record.raw_bytes for record in patches_of(cards)}
        assert len(stored) == 9
        for key, size in stored.items():
            assert 0 < size <= (budget if isinstance(budget, int) else 0.01 * int(budget[0]) * kv[key])
        energy = min(patch.energy_weighted for patch in result.patches)
        assert energy > before
        before = energy
    assert {patch.outcome for patch in cards.compile_patches(kind="orbit", budget="2%").patches} == {"found"}


def test_a_budget_without_room_in_an_orbit_is_refused_before_anything_is_learnt(cards):
    with pytest.raises(
        UsageError, match=r"chunk 1: the budget is 150 bytes, one direction of a patch takes "
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


def test_a_purge_leaves_an_orbit_alone_that_does_not_name_the_chunk(texts):
    texts.compile_patches(["1", "2", "3"], kind="orbit")
    texts.evict(["4"], purge=True)
    assert len(patches_of(texts)) == 9
