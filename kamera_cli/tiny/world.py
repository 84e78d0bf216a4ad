"""The card world: which cards stand in which chunk, and the questions that they answer.

A kind-1 card ("entity") pairs a coloured shape with a letter, a kind-2 card ("digit") pairs a letter with a
digit. In a linked pair of chunks one holds kind-1 cards and the other kind-2 cards about the same letters, so
"which digit belongs to the red circle" takes two hops, one in each chunk. Entities, letters and digits are
unique within an episode except for the letters that link two chunks, so every question has one answer, or
none ("unknown").
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from kamera_cli.tiny.vocabulary import COLOURS, DIGITS, LETTERS, SHAPES, UNKNOWN, phrasings

SLOT_SECONDS = 2.0
SLOTS_PER_CHUNK = 4
MIN_CHUNKS, MAX_CHUNKS = 2, 6
MAX_FACTS = 4
MAX_DIGIT_CHUNKS = 2
NUM_ENTITIES = len(COLOURS) * len(SHAPES)


@dataclass(frozen=True)
class Card:
    """One card: a letter with a coloured shape (kind 1), or a letter with a digit (kind 2).

    Attributes
    ----------
    letter : str
        Lower-case letter, shown in upper case.
    entity : str or None
        "colour shape", on a kind-1 card.
    digit : str or None
        Digit as a word, shown as a numeral, on a kind-2 card.
    seconds : float
        How long the card is shown.
    """

    letter: str
    entity: str | None = None
    digit: str | None = None
    seconds: float = SLOT_SECONDS

    @property
    def kind(self) -> int:
        """1 for an entity card, 2 for a digit card."""
        return 1 if self.digit is None else 2

    @property
    def thing(self) -> str:
        """What stands beside the letter: the entity of a kind-1 card, the digit of a kind-2 card."""
        thing = self.entity if self.kind == 1 else self.digit
        assert thing is not None, "a card shows an entity or a digit"
        return thing


@dataclass(frozen=True)
class ChunkSpec:
    """The cards of one chunk in the order in which they are shown.

    Attributes
    ----------
    cards : tuple of Card
        All of one kind.
    """

    cards: tuple[Card, ...]

    @property
    def kind(self) -> int:
        """Kind of its cards, 1 or 2."""
        return self.cards[0].kind

    @property
    def seconds(self) -> float:
        """Length of the chunk."""
        return sum(card.seconds for card in self.cards)


@dataclass(frozen=True)
class Question:
    """A question about an episode.

    Attributes
    ----------
    text : str
        Plain English.
    answer : str
        One or two lower-case words; "unknown" when the episode does not hold the fact.
    hops : int
        1 or 2.
    chunks : tuple of int
        Indexes of the chunks that are needed, ascending; for an unknown answer those that hold a part of the path.
    """

    text: str
    answer: str
    hops: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Query:
    """A question before it is put into words: ``asked`` and ``given`` are "letter", "digit" or "entity"."""

    asked: str
    given: str
    thing: str
    answer: str
    chunks: tuple[int, ...]

    @property
    def hops(self) -> int:
        """2 when the path goes through a letter that is not named."""
        return 1 if "letter" in (self.asked, self.given) else 2


@dataclass(frozen=True)
class Episode:
    """Chunks in the order of the window, and questions about them."""

    chunks: tuple[ChunkSpec, ...]
    questions: tuple[Question, ...]


def entity_name(index: int) -> str:
    """Name entity ``index`` of ``NUM_ENTITIES``, as "colour shape"."""
    return f"{COLOURS[index // len(SHAPES)]} {SHAPES[index % len(SHAPES)]}"


def _split_seconds(rng: np.random.Generator, facts: int) -> list[float]:
    slots = np.ones(facts, dtype=int)
    for index in rng.integers(0, facts, SLOTS_PER_CHUNK - facts):
        slots[index] += 1
    return [SLOT_SECONDS * int(n) for n in slots]


def _chunk_kinds(rng: np.random.Generator, num_chunks: int) -> tuple[int, list[int]]:
    """Choose the number of linked pairs and the kinds of the chunks that stand alone."""
    pairs = 2 if num_chunks >= 4 and rng.random() < 0.5 else 1
    alone = [1] * (num_chunks - 2 * pairs)
    if alone and pairs < MAX_DIGIT_CHUNKS and rng.random() < 0.5:
        alone[0] = 2
    return pairs, alone


def draw_chunks(rng: np.random.Generator, num_chunks: int, facts: int) -> tuple[ChunkSpec, ...]:
    """Draw the chunks of an episode: one or two linked pairs, the rest standing alone, in random order.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of every choice.
    num_chunks : int
        2 to 6.
    facts : int
        Cards in each chunk, 1 to 4.

    Returns
    -------
    tuple of ChunkSpec
        ``num_chunks`` chunks.

    Raises
    ------
    ValueError
        When a count is out of its range.
    """
    if not MIN_CHUNKS <= num_chunks <= MAX_CHUNKS:
        raise ValueError(
            f"num_chunks is {num_chunks}, but an episode has {MIN_CHUNKS} to {MAX_CHUNKS} chunks"
        )
    if not 1 <= facts <= MAX_FACTS:
        raise ValueError(f"facts is {facts}, but a chunk holds 1 to {MAX_FACTS} cards")
    pairs, alone = _chunk_kinds(rng, num_chunks)
    letters = iter(rng.permutation(len(LETTERS)).tolist())
    entities = iter(rng.permutation(NUM_ENTITIES).tolist())
    digits = iter(rng.permutation(len(DIGITS)).tolist())
    groups: list[tuple[int, list[int]]] = []
    for kinds in [(1, 2)] * pairs + [(kind,) for kind in alone]:
        shared = [next(letters) for _ in range(facts)]
        groups.extend((kind, [shared[i] for i in rng.permutation(facts)]) for kind in kinds)
    chunks = []
    for index in rng.permutation(len(groups)):
        kind, chosen = groups[index]
        seconds = _split_seconds(rng, facts)
        if kind == 1:
            cards = [
                Card(LETTERS[letter], entity=entity_name(next(entities)), seconds=length)
                for letter, length in zip(chosen, seconds, strict=True)
            ]
        else:
            cards = [
                Card(LETTERS[letter], digit=DIGITS[next(digits)], seconds=length)
                for letter, length in zip(chosen, seconds, strict=True)
            ]
        chunks.append(ChunkSpec(tuple(cards)))
    return tuple(chunks)


def answerable(chunks: tuple[ChunkSpec, ...]) -> tuple[list[Query], list[Query]]:
    """List what can be asked about the chunks and has an answer.

    Returns
    -------
    one_hop, two_hop : list of Query
        In the order of the cards.
    """
    place = {(card.letter, card.kind): (i, card) for i, c in enumerate(chunks) for card in c.cards}
    one_hop, two_hop = [], []
    for (letter, kind), (index, card) in place.items():
        other = "entity" if kind == 1 else "digit"
        one_hop.append(Query("letter", other, card.thing, letter, (index,)))
        one_hop.append(Query(other, "letter", letter, card.thing, (index,)))
        if kind == 1 and (letter, 2) in place:
            partner_index, partner = place[letter, 2]
            needed = tuple(sorted((index, partner_index)))
            two_hop.append(Query("digit", "entity", card.thing, partner.thing, needed))
            two_hop.append(Query("entity", "digit", partner.thing, card.thing, needed))
    return one_hop, two_hop


def unanswerable(chunks: tuple[ChunkSpec, ...]) -> tuple[list[Query], list[Query]]:
    """List questions about the chunks whose answer is "unknown".

    Returns
    -------
    broken, absent : list of Query
        Paths that break off because a letter is on one kind of card only, and things that are never shown.
    """
    place = {(card.letter, card.kind): (i, card) for i, c in enumerate(chunks) for card in c.cards}
    shown_entities = {card.entity for _, card in place.values() if card.kind == 1}
    shown_digits = {card.digit for _, card in place.values() if card.kind == 2}
    broken, absent = [], []
    for (letter, kind), (index, card) in place.items():
        if (letter, 3 - kind) in place:
            continue
        asked, given = ("digit", "entity") if kind == 1 else ("entity", "digit")
        broken.append(Query(asked, "letter", letter, UNKNOWN, (index,)))
        broken.append(Query(asked, given, card.thing, UNKNOWN, (index,)))
    for index in range(NUM_ENTITIES):
        if (name := entity_name(index)) not in shown_entities:
            absent += [Query(asked, "entity", name, UNKNOWN, ()) for asked in ("letter", "digit")]
    for digit in DIGITS:
        if digit not in shown_digits:
            absent += [Query(asked, "digit", digit, UNKNOWN, ()) for asked in ("letter", "entity")]
    for letter in LETTERS:
        if (letter, 1) not in place and (letter, 2) not in place:
            absent += [Query(asked, "letter", letter, UNKNOWN, ()) for asked in ("digit", "entity")]
    return broken, absent


def put_into_words(rng: np.random.Generator, query: Query) -> Question:
    """Draw one phrasing for a query; a digit may be named by its numeral, a letter is written in upper case."""
    thing = query.thing
    if query.given == "letter":
        thing = thing.upper()
    elif query.given == "digit" and rng.random() < 0.25:
        thing = str(DIGITS.index(thing))
    texts = phrasings(query.asked, query.given)
    text = texts[int(rng.integers(len(texts)))].format(thing)
    return Question(text[0].upper() + text[1:], query.answer, query.hops, query.chunks)


def draw(rng: np.random.Generator, queries: list[Query], count: int) -> list[Query]:
    """Draw up to ``count`` different queries."""
    return [queries[i] for i in rng.permutation(len(queries))[:count]]


def episode(
    seed: int, *, num_chunks: int | None = None, facts: int = MAX_FACTS, split: str = "eval"
) -> Episode:
    """Generate one episode; equal arguments give an equal episode on every machine.

    Parameters
    ----------
    seed : int
        Not negative.
    num_chunks : int, optional
        2 to 6; drawn when not given.
    facts : int
        Cards in each chunk, 1 to 4.
    split : str
        Names a sequence of episodes of its own ("train", "eval", "example"); splits share no random numbers.

    Returns
    -------
    Episode
        With up to 4 two-hop, 4 one-hop and 2 unknown questions, shuffled.

    Raises
    ------
    ValueError
        When a count is out of its range.
    """
    rng = np.random.default_rng([seed, zlib.crc32(split.encode())])
    drawn = int(rng.integers(MIN_CHUNKS, MAX_CHUNKS + 1))
    chunks = draw_chunks(rng, drawn if num_chunks is None else num_chunks, facts)
    one_hop, two_hop = answerable(chunks)
    broken, absent = unanswerable(chunks)
    chosen = draw(rng, two_hop, 4) + draw(rng, one_hop, 4) + draw(rng, broken, 1) + draw(rng, absent, 1)
    questions = tuple(put_into_words(rng, chosen[i]) for i in rng.permutation(len(chosen)))
    return Episode(chunks, questions)
