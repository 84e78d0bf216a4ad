"""Forming patches over a tree of chains: the KL that is written with each, against the plain way to measure it."""

from __future__ import annotations

import pytest
import torch
from engine_setups import write_sources
from test_conditioned import held, links, media_sources
from tiny_backbones import BACKBONES, save_backbone

from kamera_cli.engine import Engine
from kamera_cli.model import scoring
from kamera_cli.model.generate import next_token_kl
from kamera_cli.operator.assemble import assemble, joined_positions, place
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.request import PatchOptions
from kamera_cli.settings import Settings

QUESTION = "which letter goes with the red circle?"
WITHIN = {"abs": 1e-6, "rel": 1e-5}
"""Nats, and the share of a large KL that logits in fp32 leave open."""


def plain_logits(engine, parts, probe):
    """Logits after one prompt: a cache assembled for it alone, and the probe appended to that."""
    runner = engine.runner
    placed, end = place([(segment.positions, segment.num_tokens) for segment, _, _ in parts])
    layers = [
        [(kv[layer], None if patch is None else patch[layer]) for _, kv, patch in parts]
        for layer in range(runner.family.num_layers)
    ]
    cache = assemble(runner.family, layers, joined_positions(placed))
    return runner.extend(cache, runner.embed(probe), runner.positions_from(end, probe.numel()))


def plain_kl(engine, chain, probe):
    """KL of a chain with its stored patches and with none, to a plain prefill of the chain."""
    runner, library = engine.runner, engine.library
    records = [engine.store.find(link, tenant=engine.settings.tenant) for link in chain]
    segments = [library.segment(record) for record in records]
    exact = runner.prefill_captured([runner.preamble, *segments])
    canonical = [library.layers(record) for record in records]
    patches = [None] + [
        library.patch_layers(library.find_patch(chain[end], chain[:end], "exact"))
        for end in range(1, len(chain))
    ]
    front = [(runner.preamble, exact[0], None)]
    reference = plain_logits(
        engine, [*front, *zip(segments, exact[1:], [None] * len(chain), strict=True)], probe
    )
    return tuple(
        next_token_kl(
            reference, plain_logits(engine, [*front, *zip(segments, canonical, some, strict=True)], probe)
        )
        for some in (patches, [None] * len(chain))
    )


def chains_of(engine):
    """A tree with every kind of branch: long, short, from the start, below another."""
    a, b, c, d = links(engine)
    return [(a, b), (a, b, c), (a, b, c, d), (a, b, d), (a, c), (a, c, b), (d, a)]


@pytest.mark.parametrize("name", BACKBONES)
def test_the_kl_of_every_patch_of_a_tree_is_what_the_plain_way_measures(name, tmp_path):
    model = str(save_backbone(name, tmp_path / "model"))
    with Engine(Settings(store=tmp_path / "store", device="cpu", model=model)) as engine:
        engine.ingest(media_sources(name, tmp_path))
        chains = chains_of(engine)
        options = PatchOptions(rank=4, probe=QUESTION)
        formed, _ = form_chains(engine.context, chains, options)
        probe = engine.runner.question_ids(QUESTION)
        for chain, patch in zip(chains, formed, strict=True):
            kl, kl_blind = plain_kl(engine, chain, probe)
            assert patch.outcome == "formed"
            assert patch.kl == pytest.approx(kl, **WITHIN)
            assert patch.kl_blind == pytest.approx(kl_blind, **WITHIN)
            assert patch.kl_blind > 1e-5


@pytest.fixture
def engine(open_engine, tmp_path):
    made = open_engine("qwen2_5_vl")
    made.ingest(write_sources("qwen2_5_vl", tmp_path))
    return made


@pytest.mark.parametrize("cells", [1, 2000, 2**24])
def test_probes_in_one_forward_or_in_many_say_the_same(engine, monkeypatch, cells):
    runner, library = engine.runner, engine.library
    records = [engine.store.find(link, tenant=engine.settings.tenant) for link in links(engine)]
    cache, _, _, _ = runner.prefill([runner.preamble, *map(library.segment, records)])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    places, num_tokens, position = [], runner.preamble.num_tokens, runner.preamble.positions.span
    for record in records:
        num_tokens, position = num_tokens + record.meta["num_tokens"], position + record.meta["span"]
        places.append(scoring.Place(num_tokens, position))
    probe = runner.question_ids(QUESTION)
    monkeypatch.setattr(scoring, "_MASK_CELLS", cells)
    together = scoring.logits_after(runner, cache, places, probe)
    monkeypatch.setattr(scoring, "takes_masks", lambda _decoder: False)
    apart = scoring.logits_after(runner, cache, places, probe)
    assert together.shape == apart.shape == (3, runner.model.config.get_text_config().vocab_size)
    assert float((together - apart).abs().max()) <= 1e-4
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_forming_twice_gives_the_same_bytes(engine):
    chains = [tuple(links(engine)[:length]) for length in (2, 3)]

    def digests():
        patches = [engine.library.find_patch(chain[-1], chain[:-1], "exact") for chain in chains]
        return [
            [layer.rotary.u.tolist() for layer in engine.library.patch_layers(patch)] for patch in patches
        ]

    form_chains(engine.context, chains, PatchOptions(rank=3))
    first = digests()
    form_chains(engine.context, chains, PatchOptions(rank=2))
    engine.compile_patches(rank="auto")
    form_chains(engine.context, chains, PatchOptions(rank=3))
    assert digests() == first


def test_the_cost_in_prefills_is_told_where_a_prefill_was_timed_and_only_there(engine):
    a, b, c = links(engine)
    _, untimed = form_chains(engine.context, [(a, b)], PatchOptions())
    assert untimed.form_ratio is None and untimed.prefill_ms > 0 and untimed.measure_ms > 0
    _, timed = form_chains(engine.context, [(a, c), (a, c, b)], PatchOptions(time_prefill=True))
    assert timed.form_ratio == timed.forming_ms / timed.plain_ms
    assert timed.forming_ms >= timed.prefill_ms
    _, found = form_chains(engine.context, [(a, b)], PatchOptions(time_prefill=True))
    assert found.form_ratio is None and found.prefill_ms == 0.0 and found.measure_ms == 0.0


def test_a_chain_much_longer_than_its_first_chunk_is_prefilled_at_once(engine, monkeypatch):
    import kamera_cli.patches.tree as module

    a, b, c = links(engine)
    (chain,) = held(engine, [(a, b, c)])
    warm = module.conditioned(engine.runner, [chain])
    monkeypatch.setattr(module, "COLD_FROM", 0)
    cold = module.conditioned(engine.runner, [chain])
    _, costs = form_chains(engine.context, [(a, b), (a, b, c)], PatchOptions())
    assert costs.plain_ms == costs.prefill_ms and costs.form_ratio > 1
    for ours, theirs in zip(warm[chain], cold[chain], strict=True):
        assert torch.allclose(ours.plain, theirs.plain, rtol=1e-4, atol=1e-5)
