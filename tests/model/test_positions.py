"""Positions that differ from the model's own for the whole prompt: a token count in place of a span, seconds lost."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_model import own_positions
from vision_inputs import clip, picture

from kamera_cli.model.positions import RelativePositions, media_positions, text_positions
from kamera_cli.operator.assemble import joined_positions, place

SIDES = st.sampled_from([2, 4, 6, 10, 26])
TEXT = st.tuples(st.just("text"), st.integers(1, 40))
IMAGE = st.tuples(st.just("image"), st.just(1), SIDES, SIDES)
VIDEO = st.tuples(
    st.just("video"),
    st.integers(1, 9),
    SIDES,
    SIDES,
    st.sampled_from([2.0, 1.0, 0.5, 0.4, 0.25, 0.083, 1 / 12, 3.7]),
)


def tokens(item: tuple, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and types of one item; media stand between their start and end tokens."""
    if item[0] == "text":
        return torch.full((item[1],), 20), torch.zeros(item[1], dtype=torch.int64)
    num = item[1] * item[2] * item[3] // 4
    pad, kind = (config.image_token_id, 1) if item[0] == "image" else (config.video_token_id, 2)
    ids = [config.vision_start_token_id, *[pad] * num, config.vision_end_token_id]
    return torch.tensor(ids), torch.tensor([0, *[kind] * num, 0])


def grids(items: list[tuple]) -> dict[str, torch.Tensor | None]:
    images = [item[1:4] for item in items if item[0] == "image"]
    videos = [item[1:4] for item in items if item[0] == "video"]
    seconds = [item[4] for item in items if item[0] == "video"]
    return {
        "image_grid": torch.tensor(images) if images else None,
        "video_grid": torch.tensor(videos) if videos else None,
        "second_per_grid": torch.tensor(seconds) if videos else None,
    }


def stored(model, item: tuple) -> tuple[RelativePositions, int]:
    """Positions as they are kept with a chunk, computed from the chunk alone."""
    ids, types = tokens(item, model.config)
    if item[0] == "text":
        return text_positions(item[1], mrope=True), item[1]
    return media_positions(model, ids, types, **grids([item])), ids.numel()


def whole(model, items: list[tuple]) -> torch.Tensor:
    """The model's own positions of all items as one prompt, followed by one more text token."""
    pairs = [tokens(item, model.config) for item in [*items, ("text", 1)]]
    ids, types = (torch.cat(column) for column in zip(*pairs, strict=True))
    return own_positions(model, ids, types, **grids(items))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.one_of(TEXT, IMAGE, VIDEO), min_size=1, max_size=7))
def test_placed_chunks_have_the_positions_of_the_whole_prompt(runners, items):
    model = runners("qwen2_5_vl").model
    placed, end = place([stored(model, item) for item in [("text", 3), *items]])
    own = whole(model, [("text", 3), *items])
    assert torch.equal(joined_positions(placed), own[:, :-1])
    assert own[:, -1].tolist() == [end] * 3


def test_every_order_of_real_model_inputs_has_the_positions_of_the_whole_prompt(runners):
    runner = runners("qwen2_5_vl")
    chunks = [
        picture(runner, 1, height=30, width=150),
        clip(runner, 2, fps=2.0),
        clip(runner, 3, fps=8.0, frames=12, width=112),
        runner.text_inputs(torch.arange(9, 26)),
    ]
    for order in itertools.permutations(chunks):
        ids = torch.cat([runner.preamble_ids, *(chunk.token_ids for chunk in order)])
        types = torch.cat([torch.zeros_like(runner.preamble_ids), *(chunk.token_types for chunk in order)])

        def joined(name: str, order=order) -> torch.Tensor:
            return torch.cat([chunk.tensors[name] for chunk in order if name in chunk.tensors])

        own = own_positions(
            runner.model,
            ids,
            types,
            image_grid=joined("image_grid_thw"),
            video_grid=joined("video_grid_thw"),
            second_per_grid=joined("second_per_grid_ts"),
        )
        sizes = [(runner.preamble.positions, runner.preamble.num_tokens)]
        sizes += [(chunk.positions, chunk.num_tokens) for chunk in order]
        assert torch.equal(joined_positions(place(sizes)[0]), own)


@pytest.mark.parametrize("num_before", [0, 1, 37, 300])
def test_text_after_an_image_starts_at_its_span_and_not_at_its_token_count(runners, num_before):
    """KV-3: grid 1x4x6 takes 8 tokens with its marks, and moves the next token on by 3 + 2."""
    model = runners("qwen2_5_vl").model
    positions, num_tokens = stored(model, ("image", 1, 4, 6))
    assert (num_tokens, positions.span) == (8, 5)
    before = [("text", num_before)] if num_before else []
    _, end = place([*(stored(model, item) for item in before), (positions, num_tokens)])
    assert end == num_before + 5 == int(whole(model, [*before, ("image", 1, 4, 6)])[0, -1])


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(2.0, [0, 4, 8, 12]), (1.0, [0, 2, 4, 6]), (0.5, [0, 1, 2, 3]), (0.4, [0, 0, 1, 2]), (0.25, [0, 0, 1, 1]),
     (0.083, [0, 0, 0, 0])],
)  # fmt: skip
def test_time_positions_follow_the_sampled_rate(runners, seconds, steps):
    """VID-7: F4's table; transformers 5.17 cuts the seconds to whole ones."""
    if transformers.__version__.startswith("5.17.") and seconds < 1:
        steps = [0] * 4
    positions, _ = stored(runners("qwen2_5_vl").model, ("video", 4, 4, 4, seconds))
    assert (positions.ids[0, 1:-1].reshape(4, 4)[:, 0] - 1).tolist() == steps


@pytest.mark.parametrize("fps", [1.0, 2.0, 4.0, 8.0, 0.5])
def test_the_processor_is_told_the_real_rate(runners, fps):
    """VID-7: a processor that is given no metadata assumes 24 frames per second."""
    chunk = clip(runners("qwen2_5_vl"), fps=fps)
    assert chunk.tensors["second_per_grid_ts"].tolist() == pytest.approx([2 / fps])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_text_models_count_from_zero(runners, family):
    runner = runners(family)
    assert runner.positions_from(7, 3).tolist() == [7, 8, 9]
    placed, end = place(
        [(runner.preamble.positions, runner.preamble.num_tokens), (text_positions(5, mrope=False), 5)]
    )
    assert joined_positions(placed).tolist() == list(range(end)) and end == runner.preamble.num_tokens + 5
