"""Training batches: episodes laid out as token ids, picture features, positions and masks.

Every sequence is [preamble][chunk] x N followed by independent questions, each of which sees the chunks and itself
alone and stands at the position right after the last chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kamera_cli.tiny.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES, UNKNOWN
from kamera_cli.tiny.world import (
    ChunkSpec,
    Query,
    answerable,
    draw,
    draw_chunks,
    put_into_words,
    unanswerable,
)

STEP_TOKENS = 16
GRID_SIDE = 4
QUESTION_TOKENS = 17
IGNORE = -100


@dataclass(frozen=True)
class Shape:
    """What all episodes of a batch have in common.

    Attributes
    ----------
    num_chunks, facts : int
        As in ``world.draw_chunks``.
    seconds_per_slot : int
        1: every card takes one grid step; 2: chunks last 8 s, a grid step is a second.
    apart : bool
        Chunks do not see each other, and only one-hop questions are asked.
    batch : int
        Episodes.
    questions : int
        Questions for each episode.
    kept : int
        Picture tokens that are kept of the 16 of each grid step; all of them carry the card, so most of the training
        can do with a few, drawn anew for each batch, at their own positions.
    """

    num_chunks: int
    facts: int
    seconds_per_slot: int
    apart: bool
    batch: int
    questions: int = 12
    kept: int = STEP_TOKENS

    @property
    def num_steps(self) -> int:
        """Grid steps of one chunk."""
        return self.facts if self.seconds_per_slot == 1 else 8

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk, with start and end mark."""
        return self.kept * self.num_steps + 2

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the questions."""
        return 2 + self.num_chunks * self.chunk_tokens


@dataclass(frozen=True)
class Batch:
    """One batch; P prefix tokens, Q questions of L tokens each.

    Attributes
    ----------
    shape : Shape
        What its episodes have in common.
    ids : torch.Tensor
        int64, (B, P + Q * L).
    steps : torch.Tensor
        int64, (B, num_chunks, steps of a chunk): grid steps in the bank of features.
    places : torch.Tensor
        int64, (num_chunks, steps of a chunk, kept): tokens of the grid step that are kept.
    positions : torch.Tensor
        int64, (3, B, P + Q * L).
    hidden : torch.Tensor
        int64, (B, Q): chunk that a question cannot see, -1 for none.
    targets : torch.Tensor
        int64, (B, Q * L): next token where an answer is due, else ``IGNORE``.
    kinds : numpy.ndarray
        (B, Q): 0 one hop, 1 two hops, 2 two hops with a hidden chunk, 3 unknown.
    bind : torch.Tensor
        int64, (B, num_chunks, steps of a chunk, 2): token ids that a card should have taken in from an earlier chunk,
        colour and shape, or digit twice; ``IGNORE`` where there is no partner.
    look : torch.Tensor
        bool, (B, Q, num_chunks, steps of a chunk): grid steps of the card that holds the answer: the card itself
        for one hop, the later of the two cards for two hops; nowhere for an unknown answer.
    """

    shape: Shape
    ids: torch.Tensor
    steps: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    targets: torch.Tensor
    kinds: np.ndarray
    bind: torch.Tensor
    look: torch.Tensor


def holds_answer(chunks: tuple[ChunkSpec, ...], query: Query) -> tuple[int, int] | None:
    """Return chunk and card in which the answer can be read once later cards have taken in earlier ones."""
    if query.answer == UNKNOWN:
        return None
    names = {query.thing, query.answer}
    chunk = query.chunks[-1]
    for index, card in enumerate(chunks[chunk].cards):
        if names & {card.letter, card.entity, card.digit}:
            return chunk, index
    raise ValueError(f"no card of chunk {chunk} shows one of {sorted(names)}")


class Writer:
    """Turns words into token ids as the shipped tokenizer does."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary
        self.preamble = [vocabulary["<|im_start|>"], vocabulary["user"]]
        self.tail = [vocabulary["<|im_end|>"], vocabulary["<|im_start|>"], vocabulary["assistant"]]

    def words(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        spaced = text.lower()
        for mark in "?.:,":
            spaced = spaced.replace(mark, f" {mark} ")
        return [self.vocabulary[word] for word in spaced.split()]

    def block(self, rng: np.random.Generator, query: Query) -> tuple[list[int], list[int]]:
        """Return ids and targets of one question with its answer, both ``QUESTION_TOKENS`` long."""
        question = self.words(put_into_words(rng, query).text)
        if rng.random() < 0.05:
            common = self.words("tell me the is with to it")
            places = [i for i, word in enumerate(question) if word in common]
            if places:
                question[places[int(rng.integers(len(places)))]] = self.vocabulary["<|unk|>"]
        answer = self.words(query.answer)
        ids = question + self.tail + answer
        targets = [IGNORE] * (len(question) + len(self.tail) - 1) + answer + [self.vocabulary["<|im_end|>"]]
        missing = QUESTION_TOKENS - len(ids)
        return ids + [self.vocabulary["<|pad|>"]] * missing, targets + [IGNORE] * missing


def choose_queries(rng: np.random.Generator, chunks: tuple[ChunkSpec, ...], shape: Shape) -> list[Query]:
    """Choose the questions of an episode: mostly two-hop if the chunks see each other, one-hop alone if not."""
    one_hop, two_hop = answerable(chunks)
    broken, absent = unanswerable(chunks)
    if shape.apart:
        lost = [q for q in broken + absent if q.hops == 1]
        first = draw(rng, [q for q in broken if q.hops == 1], 1) + draw(rng, lost, 1)
    else:
        first = draw(rng, two_hop, shape.questions // 2) + draw(rng, broken, 1) + draw(rng, absent, 1)
    rest = shape.questions - len(first)
    repeats = -(-rest // len(one_hop))
    return first + draw(rng, one_hop * repeats, rest)


def _positions(rng: np.random.Generator, shape: Shape, places: np.ndarray) -> np.ndarray:
    """Positions of one episode, (3, P + Q * L), with occasional gaps and either rule for the span of a video."""
    interval = float(rng.choice([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 0.5]))
    longest = bool(rng.random() < 0.3)
    gaps = rng.random() < 0.15
    time = (np.arange(shape.num_steps) * interval).astype(int)
    span = max(GRID_SIDE, int(time[-1]) + 1) if longest else GRID_SIDE
    columns, place = [np.tile(np.arange(2), (3, 1))], 2
    for kept in places:
        grid = np.stack([np.broadcast_to(time[:, None], kept.shape), kept // GRID_SIDE, kept % GRID_SIDE])
        place += int(rng.integers(0, 40)) if gaps and rng.random() < 0.5 else 0
        end = place + 1 + span
        columns += [np.full((3, 1), place), grid.reshape(3, -1) + place + 1, np.full((3, 1), end)]
        place = end + 1
    question = np.tile(np.arange(QUESTION_TOKENS) + place, (3, shape.questions))
    return np.concatenate([*columns, question], axis=1)


class Maker:
    """Draws batches from the card world and a bank of labelled card clips.

    Parameters
    ----------
    vocabulary : dict
        Word to token id.
    cards : dict
        From (letter, entity or digit) to the numbers of its clips in the bank, each of two grid steps.
    """

    def __init__(self, vocabulary: dict[str, int], cards: dict[tuple[str, str], np.ndarray]) -> None:
        self.writer = Writer(vocabulary)
        self.cards = cards

    def _steps_of(self, rng: np.random.Generator, card, count: int) -> list[int]:
        clips = self.cards[card.letter, card.entity or card.digit]
        if count == 1:
            return [int(rng.choice(clips)) * 2 + int(rng.integers(2))]
        return [int(clip) * 2 + half for clip in rng.choice(clips, count // 2) for half in (0, 1)]

    def _bind_of(self, chunks: tuple[ChunkSpec, ...]) -> list[list[list[int]]]:
        vocabulary, seen, rows = self.writer.vocabulary, {}, []
        for chunk in chunks:
            row = []
            for card in chunk.cards:
                partner = seen.get((card.letter, 3 - card.kind))
                names = (
                    [] if partner is None else (partner.entity or f"{partner.digit} {partner.digit}").split()
                )
                row.append([vocabulary[name] for name in names] or [IGNORE, IGNORE])
            rows.append(row)
            seen.update({(card.letter, card.kind): card for card in chunk.cards})
        return rows

    def make(self, rng: np.random.Generator, shape: Shape) -> Batch:
        """Draw one batch."""
        v = self.writer.vocabulary
        media = (
            [v["<|vision_start|>"]] + [v["<|video_pad|>"]] * (shape.chunk_tokens - 2) + [v["<|vision_end|>"]]
        )
        prefix = self.writer.preamble + media * shape.num_chunks
        ids, steps, positions, hidden, targets, kinds, bind = [], [], [], [], [], [], []
        look = np.zeros((shape.batch, shape.questions, shape.num_chunks, shape.num_steps), dtype=bool)
        order = rng.permuted(np.tile(np.arange(STEP_TOKENS), (shape.num_chunks, shape.num_steps, 1)), axis=-1)
        places = np.sort(order[..., : shape.kept], axis=-1)
        for row in range(shape.batch):
            chunks = draw_chunks(rng, shape.num_chunks, shape.facts)
            counts = [
                [1 if shape.seconds_per_slot == 1 else int(card.seconds) for card in chunk.cards]
                for chunk in chunks
            ]
            steps.append(
                [
                    [
                        s
                        for card, n in zip(chunk.cards, count, strict=True)
                        for s in self._steps_of(rng, card, n)
                    ]
                    for chunk, count in zip(chunks, counts, strict=True)
                ]
            )
            bind.append(
                [
                    [label for label, n in zip(labels, count, strict=True) for _ in range(n)]
                    for labels, count in zip(self._bind_of(chunks), counts, strict=True)
                ]
            )
            queries = choose_queries(rng, chunks, shape)
            for number, query in enumerate(queries):
                if (found := holds_answer(chunks, query)) is not None:
                    begin = sum(counts[found[0]][: found[1]])
                    look[row, number, found[0], begin : begin + counts[found[0]][found[1]]] = True
            blocks = [self.writer.block(rng, query) for query in queries]
            hides = [
                query.chunks[0] if query.hops == 2 and len(query.chunks) == 2 and rng.random() < 0.5 else -1
                for query in queries
            ]
            kinds.append(
                [
                    3 if query.answer == "unknown" else query.hops - 1 + (hide >= 0)
                    for query, hide in zip(queries, hides, strict=True)
                ]
            )
            ids.append(prefix + [i for block in blocks for i in block[0]])
            targets.append([i for block in blocks for i in block[1]])
            hidden.append(hides)
            positions.append(_positions(rng, shape, places))
        return Batch(
            shape,
            torch.tensor(ids),
            torch.tensor(steps),
            torch.from_numpy(places),
            torch.from_numpy(np.stack(positions, axis=1)),
            torch.tensor(hidden),
            torch.tensor(targets),
            np.array(kinds),
            torch.tensor(bind),
            torch.from_numpy(look),
        )


def question_bias(batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask of the question rows, (B, 1, Q * L, P + Q * L)."""
    shape = batch.shape
    rows = torch.arange(shape.questions * QUESTION_TOKENS)
    question, place = rows // QUESTION_TOKENS, rows % QUESTION_TOKENS
    own = (question[:, None] == question[None]) & (place[:, None] >= place[None])
    column = torch.arange(shape.prefix_tokens)
    chunk = torch.where(column < 2, -2, (column - 2) // shape.chunk_tokens)
    seen = batch.hidden[:, question][:, :, None] != chunk[None, None]
    allowed = torch.cat([seen, own.expand(len(seen), -1, -1)], dim=-1)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def label_sets(vocabulary: dict[str, int]) -> dict[str, torch.Tensor]:
    """Token ids of colours, shapes and digits, apart, and under "weight" the weight of each token in the answer loss.

    The end mark is easy and in every answer; letters are the hardest to read out and answer one question in four.
    """
    names = {"colour": COLOURS, "shape": SHAPES, "digit": DIGITS}
    sets = {name: torch.tensor([vocabulary[word] for word in words]) for name, words in names.items()}
    weight = torch.ones(max(vocabulary.values()) + 1)
    weight[vocabulary["<|im_end|>"]] = 0.2
    weight[[vocabulary[letter] for letter in LETTERS]] = 4.0
    return sets | {"weight": weight}
