"""Conditioned KV over a tree of chains, against one plain prefill of each chain."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from engine_setups import write_sources
from tiny_backbones import BACKBONES, MEDIA, save_backbone
from tiny_models import write_noise_image, write_noise_video, write_passage

from kamera_cli.engine import Engine
from kamera_cli.errors import NotFoundError, UsageError
from kamera_cli.patches.chunk import read_chunks
from kamera_cli.patches.form import form_chains
from kamera_cli.patches.request import PatchOptions
from kamera_cli.patches.tree import branches, conditioned, each_conditioned, starts_cold
from kamera_cli.results import WindowEntry
from kamera_cli.settings import Settings
from kamera_cli.window import identity_of
from kamera_store.format.keys import Identity

RELATIVE = 2e-5
"""Of the largest value of a tensor: what fp32 sums in another order may differ by."""


def media_sources(name, folder):
    if not MEDIA[name]:
        return [
            write_passage(folder / f"{stem}.txt", 12 + 3 * seed, seed) for seed, stem in enumerate("abcd")
        ]
    second = (
        write_noise_video(folder / "b.mp4", 2, seconds=2)
        if "video" in MEDIA[name]
        else write_noise_image(folder / "b.png", 2, width=56)
    )
    pictures = [write_noise_image(folder / "a.png", 1, width=84), second]
    return [
        *pictures,
        write_noise_image(folder / "c.png", 3, width=56, height=56),
        write_passage(folder / "d.txt", 12, 4),
    ]


def links(engine):
    return [identity_of(entry) for entry in engine.window().entries]


def held(engine, chains):
    """The same chains, of chunks in memory."""
    chunks = read_chunks(engine.context, [link for chain in chains for link in chain])
    return [tuple(chunks[link] for link in chain) for chain in chains]


def plain(engine, chain):
    """KV of the last chunk out of one cold prefill of the whole chain."""
    segments = [chunk.segment for chunk in chain]
    return engine.runner.prefill_captured([engine.runner.preamble, *segments])[-1]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("rotary", "plain"):
            mine, whole = getattr(ours, name), getattr(theirs, name)
            assert mine.shape == whole.shape
            assert float((mine - whole).abs().max()) <= RELATIVE * float(whole.abs().max())


@pytest.mark.parametrize("name", BACKBONES)
def test_all_orders_of_four_chunks_hold_what_a_plain_prefill_of_each_gives(name, tmp_path):
    with Engine(
        Settings(store=tmp_path / "store", device="cpu", model=str(save_backbone(name, tmp_path / "m")))
    ) as engine:
        engine.ingest(media_sources(name, tmp_path))
        chunks = links(engine)
        assert len(chunks) == 4
        chains = held(engine, [order[:size] for order in permutations(chunks) for size in (1, 2, 3, 4)])
        calls = engine.vision_calls
        found = conditioned(engine.runner, chains)
        assert engine.vision_calls == calls
        assert set(found) == set(chains)
        for chain in set(chains):
            assert_equal(found[chain], plain(engine, chain))


@pytest.fixture
def engine(open_engine, tmp_path):
    made = open_engine("qwen2_5_vl")
    made.ingest(write_sources("qwen2_5_vl", tmp_path))
    return made


def test_each_node_of_the_tree_is_prefilled_once_and_the_first_chunk_never(engine, monkeypatch):
    forwards = []
    run = type(engine.runner).prefill_captured

    def counted(self, segments, cache=None, start=0):
        forwards.append([segment.num_tokens for segment in segments])
        return run(self, segments, cache, start)

    a, b, c = links(engine)
    spans = {
        link: engine.store.find(link, tenant=engine.settings.tenant).meta["num_tokens"] for link in (a, b, c)
    }
    assert engine.runner.preamble_layers
    monkeypatch.setattr(type(engine.runner), "prefill_captured", counted)
    conditioned(engine.runner, held(engine, [(a, b), (a, b, c), (a, c), (b,)]))
    assert sorted(forwards) == sorted([[spans[b], spans[c]], [spans[c]]])


def test_only_the_caches_of_one_path_are_alive(engine, monkeypatch):
    import kamera_cli.patches.tree as module

    lengths = []
    shorten = module.shorten
    monkeypatch.setattr(
        module, "shorten", lambda cache, held: (shorten(cache, held), lengths.append(cache.get_seq_length()))
    )
    a, b, c = links(engine)
    for _ in each_conditioned(engine.runner, held(engine, [(a, b), (a, c), (b, a), (b, c)])):
        pass
    start = engine.runner.preamble.num_tokens
    counts = [engine.store.find(link, tenant=engine.settings.tenant).meta["num_tokens"] for link in (a, b)]
    assert lengths == [start + counts[0]] * 2 + [start + counts[1]] * 2


def identities(text):
    return tuple(Identity("chunk", letter.encode() * 16, letter.encode() * 32) for letter in text)


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        (["abc"], "abc"),
        (["ab", "abc"], "abc"),
        (["abc", "abd"], "ab(c)(d)"),
        (["abc", "abd", "ab", "acb"], "a(b(c)(d))(cb)"),
        (["a", "b"], "a|b"),
        (["abcd", "abc", "abce"], "abc(d)(e)"),
        ([], ""),
    ],
)
def test_chains_part_only_where_they_differ(chains, expected):
    def told(branch):
        return "".join(link.key[:1].decode() for link in branch.links) + "".join(
            f"({told(one)})" for one in branch.after
        )

    assert "|".join(map(told, branches([identities(chain) for chain in chains]))) == expected


def test_a_chain_of_thousands_of_chunks_needs_no_deep_recursion():
    chain = tuple(Identity("chunk", index.to_bytes(16), bytes(32)) for index in range(5000))
    (one,) = branches([chain, chain[:3000]])
    assert one.links == chain and one.after == ()


def test_a_purged_chunk_and_a_chain_beyond_the_context_are_named_before_any_forward(engine, monkeypatch):
    a, b, c = links(engine)
    monkeypatch.setattr(type(engine.runner), "prefill_captured", lambda *_: pytest.fail("a forward ran"))
    gone = WindowEntry(9, "78" * 16, "78" * 32, "gone", 1)
    view = engine.window()
    context = engine.context.numbered(replace(view, entries=(*view.entries, gone)))
    with pytest.raises(NotFoundError, match="chunk 9 is no longer in the store"):
        form_chains(context, [(a, b), (a, identity_of(gone))], PatchOptions())
    with pytest.raises(UsageError, match="tokens, the context of"):
        form_chains(context, [(a, b), (a, b, c) * 400], PatchOptions())


def test_a_prefill_starts_from_the_store_while_that_saves_more_than_its_attention_costs():
    tiny, wide = (3_500_000, 3_000), (97_000_000, 18_000)
    assert not starts_cold(390, 145, *tiny) and starts_cold(910, 145, *tiny)
    assert not starts_cold(1300, 145, *wide) and starts_cold(2000, 145, *wide)
    assert not starts_cold(910, 600, *tiny), "a long first chunk is worth starting from"
