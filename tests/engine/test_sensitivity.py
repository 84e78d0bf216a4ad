"""Ranks that follow a sensitivity that was guessed, measured on nothing, or trusted more than it can prove."""

from __future__ import annotations

import pytest
import torch
from engine_setups import open_on_cards, write_cards

from kamera_cli.errors import UsageError
from kamera_cli.model.families.family import LayerKV
from kamera_cli.operator.plan import AUTO_MAX_KL, AUTO_MIN_ENERGY
from kamera_cli.patches import worth as sensitivity
from kamera_cli.patches.worth import LEAST_FELT, MAX_TRIES, SENSITIVITY, Prompt, known_worth, measure
from kamera_cli.trust import proven_energy
from kamera_store.errors import DamagedError
from kamera_store.format.tensors import to_bytes


@pytest.fixture(scope="session")
def card_file(tmp_path_factory):
    return write_cards(tmp_path_factory.mktemp("cards"), 2)


@pytest.fixture
def cards(open_engine, card_file):
    """An episode of five chunks before the embedded model."""
    return open_on_cards(open_engine, card_file[0])


def patches_of(engine):
    return [record for record in engine.store.iterate(kind="patch")]


def test_sensitivity_is_measured_once_and_ranks_go_where_it_is(cards, monkeypatch):
    first = cards.compile_patches()
    state = cards.store.get_state(SENSITIVITY, cards.fingerprint).value
    assert first.learn_ms > 0 and [len(window["chunks"]) for window in state["windows"]] == [5]
    assert max(tensor[0] for layer in state["layers"] for tensor in layer) >= LEAST_FELT
    weights = known_worth(cards.context).layers
    assert weights[0] == (0.0, 0.0) and max(range(6), key=lambda layer: weights[layer][0]) == 4
    for patch in first.patches:
        assert patch.split[0] == (0, 0)
        assert sum(patch.split[4]) >= max(sum(layer) for layer in patch.split)
        assert patch.energy_weighted >= 0.985
    monkeypatch.setattr(sensitivity, "measure", lambda _context: pytest.fail("measured again"))
    again = cards.compile_patches(energy=0.97)
    assert {patch.outcome for patch in again.patches} == {"formed"}


def test_a_budget_is_kept_by_every_patch_and_a_larger_one_buys_energy(cards):
    before, spent = 0.0, 0
    for budget in (6_000, "1%", "2%"):
        result = cards.compile_patches(budget=str(budget))
        for patch in result.patches:
            allowed = budget if isinstance(budget, int) else int(0.01 * int(budget[0]) * patch.chunk_kv_bytes)
            assert 0 < patch.patch_bytes <= allowed
        energy = min(patch.energy_weighted for patch in result.patches)
        assert energy > before and sum(patch.patch_bytes for patch in result.patches) > spent
        before, spent = energy, sum(patch.patch_bytes for patch in result.patches)
    assert {patch.outcome for patch in cards.compile_patches(budget="2%").patches} == {"found"}


def test_a_budget_without_room_for_one_direction_writes_nothing(cards):
    with pytest.raises(UsageError, match=r"200 bytes, one direction of a patch takes 269"):
        cards.compile_patches(budget="200")
    assert not patches_of(cards) and cards.store.get_state(SENSITIVITY, cards.fingerprint) is None


def test_a_thin_patch_with_a_small_kl_on_closing_tokens_is_still_refused(cards, card_file):
    """A KL is measured on one question, and a patch of rank 1 measured well on none at all."""
    cards.compile_patches()
    question = next(part.text for part in card_file[1].questions if part.hops == 2)
    assert cards.query(question).fallback is None
    for request in ({"rank": 1}, {"budget": "0.3%"}):
        formed = cards.compile_patches(**request).patches
        thin = [patch for patch in formed if patch.energy_weighted < AUTO_MIN_ENERGY]
        assert any(patch.kl <= 0.1 * AUTO_MAX_KL for patch in thin)
        result = cards.query(question)
        why = {chunk.number: chunk.why_not for chunk in result.chunks}
        assert {why[patch.chunk_number] for patch in thin} == {"low_energy"}
        assert result.fallback and {chunk.used for chunk in result.chunks} == {"prefilled"}


def test_windows_in_which_nothing_is_felt_leave_all_layers_alike(open_engine, tmp_path, monkeypatch):
    from tiny_models import write_passage

    engine = open_engine("qwen2")
    engine.ingest([write_passage(tmp_path / f"{index}.txt", 12, index) for index in range(3)])
    monkeypatch.setattr(sensitivity, "LEAST_FELT", 1e9)
    numbers = ["1", "2", "3"]
    for turn in range(MAX_TRIES + 2):
        result = engine.compile_patches(numbers, energy=0.9 + 0.01 * turn)
        assert all(patch.energy_weighted is None for patch in result.patches)
        windows = engine.store.get_state(SENSITIVITY, engine.fingerprint).value["windows"]
        assert len(windows) == min(turn + 1, MAX_TRIES)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_the_measured_kl_is_that_of_the_tensor_that_was_changed(family, tmp_path, open_engine):
    """Against the same change made in a cache by hand, one probe at a time and without a mask."""
    from tiny_backbones import save_backbone
    from tiny_models import write_passage

    from kamera_cli.model.generate import next_token_kl
    from kamera_cli.operator.assemble import joined_positions, place

    engine = open_engine(model=str(save_backbone(family, tmp_path / "model")))
    engine.ingest([write_passage(tmp_path / f"{index}.txt", 12, index) for index in range(2)])
    runner, library = engine.runner, engine.library
    records = [library.find_chunk(entry) for entry in engine.window().entries]
    segments = [runner.preamble, *map(library.segment, records)]
    canonical = [runner.preamble_layers, *map(library.layers, records)]
    conditioned = runner.prefill_captured(segments)
    found = measure(Prompt(runner, segments, canonical, conditioned))
    placed, end = place([(part.positions, part.num_tokens) for part in segments])
    positions, last = joined_positions(placed), runner.family.num_layers - 1

    def logits(name, probe):
        layers = []
        for number in range(runner.family.num_layers):
            tensors = {}
            for part in ("rotary", "plain"):
                after, alone = (
                    torch.cat([getattr(chunk[number], part) for chunk in chunks])
                    for chunks in (conditioned, canonical)
                )
                left_out = 0.1**0.5 if (number, part) == (last, name) else 0.0
                tensors[part] = after - left_out * (after - alone)
            layers.append(LayerKV(**tensors))
        cache = runner.family.cache(layers, positions)
        return runner.extend(cache, runner.embed(probe), runner.positions_from(end, probe.numel()))

    probes = sensitivity._probes(runner)[:4]
    assert found[0][1].total == pytest.approx(0.0, abs=1e-6)
    for index, name in enumerate(("rotary", "plain")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sensitivity, "_probes", lambda _runner: probes)
            kl = measure(Prompt(runner, segments, canonical, conditioned))[last][index].kl
        by_hand = sum(next_token_kl(logits(None, probe), logits(name, probe)) for probe in probes) / 4
        assert kl == pytest.approx(by_hand, rel=2e-2, abs=1e-9) and kl > 0


def test_half_precision_patches_written_before_integers_are_still_read(cards):
    cards.compile_patches(["1", "2"], rank=6, factor_dtype="fp16")
    record = patches_of(cards)[0]
    new = cards.library.patch_layers(record)
    meta = {
        name: value
        for name, value in record.meta.items()
        if name not in ("factors", "split", "energy_weighted")
    }
    tensors = [
        to_bytes(f"{name}_{side}", getattr(factors, side).half(), layer=layer)
        for layer, patch in enumerate(new)
        for name, factors in zip(cards.library.names, (patch.rotary, patch.plain), strict=True)
        for side in "uv"
    ]
    from kamera_store.format.keys import Identity

    identity = Identity("patch", record.key, record.digest)
    cards.store.put(
        identity,
        tenant=record.tenant,
        unit=record.unit,
        meta=meta,
        tensors=tensors,
        cost_ms=1.0,
        replace=True,
    )
    old = cards.store.get(record.key)
    assert proven_energy(old.meta) == min(old.meta["energy"])
    for one, other in zip(cards.library.patch_layers(old), new, strict=True):
        assert torch.equal(one.rotary.u, other.rotary.u) and one.rotary.bits is None


@pytest.mark.parametrize("dtype", ["int8", "int6", "int4"])
def test_integer_patches_are_read_as_they_were_formed(cards, dtype):
    result = cards.compile_patches(["1", "2"], rank=6, factor_dtype=dtype)
    record = patches_of(cards)[0]
    assert result.patches[0].patch_bytes == record.raw_bytes
    bits = int(dtype[3:])
    for layer in cards.library.patch_layers(record):
        assert layer.rotary.bits == bits and layer.rotary.u.shape[1:] == (130,)
        assert layer.plain.v.shape[1:] == (128,)
        norms = layer.rotary.v.norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0.05, atol=0)


def test_rows_of_another_length_than_the_header_says_are_damage(cards):
    cards.compile_patches(["1", "2"], rank=2)
    record = patches_of(cards)[0]
    record.meta["factors"]["num_tokens"] += 24
    with pytest.raises(DamagedError, match="length of keys_u"):
        cards.library.patch_layers(record)
