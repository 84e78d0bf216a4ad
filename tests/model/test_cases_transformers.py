"""Traps of transformers' caches and positions: TF-1, TF-3, TF-5 and TF-7 of the list of known cases."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers
from plain_model import next_logits, own_cache, own_positions
from vision_inputs import clip

from kamera_cli.model.compat import cache_argument, steps_apart
from kamera_cli.model.positions import RelativePositions, media_positions, text_positions
from kamera_cli.operator.assemble import joined_positions, place

MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SAVED = json.loads(Path(__file__).with_name("saved_positions.json").read_text(encoding="utf-8"))
"""Position ids (3, T) of each case of `CASES` with one text token before and after, by backbone."""
CASES = {"image": "i", "video": "v", "videos": "vv", "video and image": "vi"}


def item(model, kind: str) -> tuple[list[int], list[int]]:
    """Ids and types of an image of grid 1x4x6 or a video of grid 4x4x4, between their marks."""
    config = model.config
    if kind == "i":
        runs = [([config.image_token_id] * 6, [1] * 6)]
    elif steps_apart(model):
        # Qwen3-VL writes a time stamp before each step.
        runs = [([20, *[config.video_token_id] * 4], [0, *[2] * 4])] * 4
    else:
        runs = [([config.video_token_id] * 16, [2] * 16)]
    ids = [token for run, _ in runs for token in run]
    types = [kind for _, run in runs for kind in run]
    return [config.vision_start_token_id, *ids, config.vision_end_token_id], [0, *types, 0]


def grids(kinds: str) -> dict[str, torch.Tensor | None]:
    videos = kinds.count("v")
    return {
        "image_grid": torch.tensor([[1, 4, 6]] * kinds.count("i")) if "i" in kinds else None,
        "video_grid": torch.tensor([[4, 4, 4]] * videos) if videos else None,
        "second_per_grid": torch.tensor([0.5, 2.0][:videos]) if videos else None,
    }


def stored(model, kind: str, second_per_grid: float) -> tuple[RelativePositions, int]:
    """Positions as they are kept with a chunk of one item."""
    ids, types = (torch.tensor(part) for part in item(model, kind))
    given = grids(kind)
    if kind == "v":
        given["second_per_grid"] = torch.tensor([second_per_grid])
    return media_positions(model, ids, types, **given), ids.numel()


def assembled(model, kinds: str) -> list[list[int]]:
    one = (text_positions(1, mrope=True), 1)
    rates = iter([0.5, 2.0])
    items = [stored(model, kind, next(rates) if kind == "v" else 0.0) for kind in kinds]
    return joined_positions(place([one, *items, one])[0]).tolist()


def whole(model, kinds: str) -> list[list[int]]:
    """The installed model's own positions for the whole prompt at once."""
    pairs = [([20], [0]), *(item(model, kind) for kind in kinds), ([20], [0])]
    ids, types = (torch.tensor(list(chain(*column))) for column in zip(*pairs, strict=True))
    return own_positions(model, ids, types, **grids(kinds)).tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MROPE)
def test_positions_of_an_installed_release_that_are_not_the_saved_ones(runners_of, name, case):
    """TF-7: transformers 5.17 has another rule for the seconds of Qwen2.5-VL's grid steps than 5.18 and later."""
    model = runners_of(name).model
    cut = name == "qwen2_5_vl" and transformers.__version__.startswith("5.17.")
    saved = SAVED[f"{name}, seconds cut to whole ones" if cut else name][case]
    assert whole(model, CASES[case]) == assembled(model, CASES[case]) == saved


def test_a_text_that_goes_on_with_the_rope_delta_of_a_video(runners_of):
    """TF-1: 4 text tokens, an unrelated video prompt, 2 more tokens of the text."""
    runner = runners_of("qwen2_5_vl")
    model, ids = runner.model, torch.arange(20, 26)
    expected = next_logits(model, ids)
    cache, _, _, end = runner.prefill([runner.text_segment(ids[:4])])
    video = clip(runner, 1)
    own_cache(model, video.token_ids, mm_token_type_ids=video.token_types[None], **video.tensors)
    assert int(model.model.rope_deltas) != 0
    logits = runner.extend(cache, runner.embed(ids[4:]), runner.positions_from(end, 2))
    model.model.rope_deltas = None
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_text_that_goes_on_with_a_mask_of_its_new_tokens_only(runners_of):
    """TF-5: 4 cached and 2 new tokens; the library takes a mask of 2 or 4 without an error."""
    runner = runners_of("qwen2_5_vl")
    model, ids = runner.model, torch.arange(20, 26)
    expected = next_logits(model, ids)
    cache, _, _, end = runner.prefill([runner.text_segment(ids[:4])])
    logits = runner.extend(cache, runner.embed(ids[4:]), runner.positions_from(end, 2))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for length, exact in ((2, False), (4, False), (6, True)):
        cache, _, _, _ = runner.prefill([runner.text_segment(ids[:4])])
        with torch.no_grad():
            output = model(
                input_ids=ids[None, 4:],
                attention_mask=torch.ones(1, length, dtype=torch.int64),
                position_ids=torch.arange(4, 6).expand(3, 1, -1),
                use_cache=True,
                **{cache_argument(model): cache},
            )
        assert (float((output.logits[0, -1] - expected).abs().max()) < 1e-4) == exact
    model.model.rope_deltas = None


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3", "deepseek_v3"])
def test_what_is_stored_grows_with_the_cache_made_of_it(runners_of, name):
    """TF-3: three continuations of one chunk; each cache is a fresh object over fresh memory."""
    runner = runners_of(name)
    encoded = runner.encode(runner.text_inputs(torch.arange(20, 24)))
    before = [(kv.rotary.clone(), kv.plain.clone()) for kv in encoded.layers]
    start, answers = runner.preamble.positions.span, []
    for _ in range(3):
        cache = runner.family.cache(encoded.layers, encoded.segment.positions.at(start))
        assert cache.get_seq_length() == 4
        answers.append(
            runner.extend(cache, runner.embed(torch.tensor([25, 26])), runner.positions_from(start + 4, 2))
        )
        assert cache.get_seq_length() == 6
        with torch.inference_mode():
            for layer in cache.layers:
                layer.keys.zero_()
                layer.values.zero_()
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    for kv, (rotary, plain) in zip(encoded.layers, before, strict=True):
        assert torch.equal(kv.rotary, rotary) and torch.equal(kv.plain, plain)
