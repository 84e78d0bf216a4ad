"""A random walk over window operations, with a model of the window beside it and a re-prefill for every answer.

The model is lists of chunk numbers and what each is conditioned on, written apart from `kamera_cli.window`. The
reference of an answer is the model's own prefill: of the whole prompt in order, or, where chunks keep what they took in
elsewhere, of each chunk after its antecedents, put at its place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from engine_setups import first_logits
from plain_model import kl

from kamera_cli.errors import KameraError, NotFoundError, UsageError
from kamera_cli.operator.plan import AUTO_MAX_KL
from kamera_cli.patches.measure import Part, probe_logits
from kamera_store.format.keys import Identity

PREFILLED_KL = 1e-5
"""A fallback is the prefill itself, in another batch shape at most (fp32)."""

MAX_HELD = 6


@dataclass
class Shadow:
    """What the window should be: chunk numbers in order, conditioning of each, what has left, what is gone for good."""

    held: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    purged: set[int] = field(default_factory=set)

    def put(self, number: int, place: int) -> None:
        self.after[number] = tuple(self.held[:place])
        self.held.insert(place, number)


@dataclass
class Walk:
    """One engine and the operations that are drawn for it."""

    engine: object
    sources: list[Path]
    questions: list[str]
    seed: int
    kinds: tuple[str, ...] = ("orbit", "pair")
    max_held: int = MAX_HELD

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.shadow = Shadow()
        self.waiting = list(self.sources)
        self.keys: dict[int, Identity] = {}
        self.done: Counter[str] = Counter()
        self.used: Counter[str] = Counter()
        self.distances: dict[str, list[tuple[float, float]]] = {}
        self.sets: list[list[int]] = []
        self.tower_calls = 0
        self.fallbacks: Counter[str] = Counter()
        self.trouble: dict[str, list[str]] = {}
        self.told: list[str] = []
        self._conditioned: dict[tuple[int, ...], list] = {}

    def run(self, num_steps: int) -> Walk:
        """Take steps until ``num_steps`` operations were done."""
        for _ in range(3):
            self._ingest()
        while sum(self.done.values()) < num_steps:
            self.step()
        return self

    def step(self) -> None:
        """Draw one operation that the window allows, do it, and check the window."""
        weights: dict[Callable[[], None], int] = {
            self._query: 6, self._query_in_order: 4, self._query_placed: 2, self._compile: 2, self._wrong: 1
        }  # fmt: skip
        if self.waiting and len(self.shadow.held) < self.max_held:
            weights[self._ingest] = 1
        if self.shadow.left and len(self.shadow.held) < self.max_held:
            weights[self._recall] = 6
        if len(self.shadow.held) > 1:
            weights[self._evict] = 4
            weights[self._compile_in_order] = 1
            weights[self._compile_set] = 1
            weights[self._remove] = 1
        if len(self.keys) - len(self.shadow.purged) > 4:
            weights[self._purge] = 1 if self.draw.random() < 0.2 else 0
        action = self.draw.choices(list(weights), list(weights.values()))[0]
        before = self.engine.vision_calls
        action()
        self.done[action.__name__.strip("_")] += 1
        if action != self._ingest:
            self.tower_calls += self.engine.vision_calls - before
        self.check_window()

    def check_window(self) -> None:
        view, shadow = self.engine.window(), self.shadow
        assert [entry.number for entry in view.entries] == shadow.held
        assert sorted(entry.number for entry in view.evicted) == sorted(shadow.left)
        for entry in view.entries:
            wanted = tuple(self.keys[number].id for number in shadow.after[entry.number])
            assert entry.conditioned_on == wanted, (entry.number, shadow.after[entry.number])

    def _ingest(self) -> None:
        result = self.engine.ingest([self.waiting.pop()])
        for chunk in result.chunks:
            digest = self.engine.store.get(bytes.fromhex(chunk.id)).digest
            self.keys[chunk.number] = Identity("chunk", bytes.fromhex(chunk.id), digest)
            self.shadow.put(chunk.number, len(self.shadow.held))

    def _evict(self) -> None:
        shadow = self.shadow
        leaving = self.draw.sample(shadow.held, self.draw.randint(1, min(2, len(shadow.held) - 1)))
        if self.draw.random() < 0.3:
            leaving = shadow.held[: len(leaving)]
            self.engine.evict(oldest=len(leaving))
        else:
            self.engine.evict([str(number) for number in leaving])
        shadow.held = [number for number in shadow.held if number not in leaving]
        shadow.left += leaving

    def _recall(self) -> None:
        shadow = self.shadow
        room = self.max_held - len(shadow.held)
        back = self.draw.sample(shadow.left, self.draw.randint(1, min(2, room, len(shadow.left))))
        place = self.draw.randint(0, len(shadow.held))
        at = "end" if place == len(shadow.held) else place + 1
        result = self.engine.recall([str(number) for number in back], at=at)
        assert result.vision_calls == 0
        for index, number in enumerate(back):
            shadow.left.remove(number)
            shadow.put(number, place + index)

    def _compile(self) -> None:
        lost = [number for number in self.shadow.held if set(self.shadow.after[number]) & self.shadow.purged]
        try:
            self.engine.compile_patches()
        except NotFoundError as error:
            assert lost and "purged" in str(error)
        else:
            assert not lost

    def _compile_in_order(self) -> None:
        self.engine.compile_patches(self._order())

    def _compile_set(self) -> None:
        count = min(len(self.shadow.held), self.draw.choice((2, 3, 3)))
        chosen = self.draw.sample(self.shadow.held, count)
        self.engine.compile_patches([str(number) for number in chosen], kind=self.draw.choice(self.kinds))
        self.sets.append(chosen)

    def _remove(self) -> None:
        self.engine.compile_patches(kind="removal")
        before: set[int] = set()
        for number in self.shadow.held:
            kept = tuple(other for other in self.shadow.after[number] if other in before)
            self.shadow.after[number] = kept
            before.add(number)

    def _purge(self) -> None:
        known = [*self.shadow.held, *self.shadow.left]
        only = self.shadow.held if len(self.shadow.held) == 1 else []
        number = self.draw.choice([number for number in known if number not in only])
        self.engine.evict([str(number)], purge=True)
        shadow = self.shadow
        shadow.held = [other for other in shadow.held if other != number]
        shadow.left = [other for other in shadow.left if other != number]
        shadow.purged.add(number)
        assert self.engine.store.get(self.keys[number].key) is None
        for patch in self.engine.store.iterate(kind="patch"):
            assert self.keys[number].id not in (patch.meta["chunk"], *patch.meta["antecedents"])

    def _order(self) -> list[str]:
        whole = [chosen for chosen in self.sets if set(chosen) <= set(self.shadow.held)]
        if whole and self.draw.random() < 0.5:
            chosen = self.draw.choice(whole)
            return [str(number) for number in self.draw.sample(chosen, len(chosen))]
        count = self.draw.randint(1, len(self.shadow.held))
        return [str(number) for number in self.draw.sample(self.shadow.held, count)]

    def _query(self) -> None:
        shadow = self.shadow
        chains = [(*shadow.after[number], number) for number in shadow.held]
        fallback = self._ask(None, chains)
        if fallback:
            shadow.after.update({number: tuple(shadow.held[:i]) for i, number in enumerate(shadow.held)})

    def _query_in_order(self) -> None:
        order = self._order()
        numbers = [int(name) for name in order]
        self._ask(order, [tuple(numbers[: index + 1]) for index in range(len(numbers))])

    def _query_placed(self) -> None:
        """The engine chooses the order: each chunk is conditioned on what stands before it there."""
        asked = self._order()
        placed = self.engine.explain(chunks=asked, place=True)
        numbers = [chunk.number for chunk in placed.chunks]
        assert sorted(map(str, numbers)) == sorted(asked)
        self._ask(asked, [tuple(numbers[: index + 1]) for index in range(len(numbers))], place=True)

    def _ask(self, order: list[str] | None, chains: list[tuple[int, ...]], place: bool = False) -> bool:
        """Ask, and hold the answer's first logits against the conditioning that the receipt states."""
        question = self.draw.choice(self.questions)
        with first_logits(self.engine) as seen, self._prefills() as prefilled:
            result = self.engine.query(question, chunks=order, place=place, max_new_tokens=2)
        numbers = [chain[-1] for chain in chains]
        assert [receipt.number for receipt in result.chunks] == numbers
        self.used.update(receipt.used for receipt in result.chunks)
        if result.fallback is not None:
            assert all(receipt.used == "prefilled" for receipt in result.chunks), result
            chains = [tuple(numbers[: index + 1]) for index in range(len(numbers))]
            bound, found = PREFILLED_KL, prefilled[0]
            self.fallbacks[result.fallback.partition("(")[2].strip(")0123456789 ")] += 1
        else:
            assert not prefilled, "a prefill that the receipt does not state"
            assert not any(receipt.used in ("prefilled", "blind") for receipt in result.chunks), result
            bound, found = AUTO_MAX_KL, seen[0]
        distance = kl(self.reference(chains, question), found)
        stated = max((receipt.kl for receipt in result.chunks if receipt.kl is not None), default=0.0)
        kinds = {receipt.used for receipt in result.chunks}
        name = next(
            (kind for kind in ("prefilled", "composed", "orbit", "exact") if kind in kinds), "canonical"
        )
        self.distances.setdefault(name, []).append((distance, stated))
        if distance > bound:
            stated = [(receipt.used, receipt.rank, receipt.energy, receipt.kl) for receipt in result.chunks]
            line = f"KL {distance:.3g} > {bound:g}: chains {chains}, {question!r}, {stated}"
            (self.told if result.warnings else self.trouble.setdefault(name, [])).append(line)
        return result.fallback is not None

    def _prefills(self) -> _Spy:
        return _Spy(self.engine.runner)

    def reference(self, chains: list[tuple[int, ...]], question: str) -> torch.Tensor:
        """Next-token logits (vocab,) over chunks of which each holds what a prefill after its antecedents gives it."""
        runner, library = self.engine.runner, replace(self.engine.library, hot=None)
        ids = runner.question_ids(question)
        numbers = [chain[-1] for chain in chains]
        if all(chain == tuple(numbers[: index + 1]) for index, chain in enumerate(chains)):
            segments = [self._segment(library, number) for number in numbers]
            return runner.prefill([runner.preamble, *segments, runner.text_segment(ids)])[1]
        parts = [Part(runner.preamble, runner.preamble_layers)]
        for chain in chains:
            parts.append(Part(self._segment(library, chain[-1]), self._after(chain)))
        return probe_logits(runner, parts, ids)

    def _segment(self, library, number: int):
        return library.segment(library.store.find(self.keys[number], tenant=library.tenant))

    def _after(self, chain: tuple[int, ...]) -> list:
        """KV of the last chunk of a chain out of one prefill of all of it."""
        if chain not in self._conditioned:
            runner, library = self.engine.runner, replace(self.engine.library, hot=None)
            segments = [self._segment(library, number) for number in chain]
            self._conditioned[chain] = runner.prefill_captured([runner.preamble, *segments])[-1]
        return self._conditioned[chain]

    def _wrong(self) -> None:
        """A call that must be refused and leave the window as it is (which `step` checks)."""
        held, engine = [str(number) for number in self.shadow.held], self.engine
        one, question = self.draw.choice(held), self.questions[0]
        calls: list[tuple[Callable[[], object], type[KameraError]]] = [
            (lambda: engine.recall([one]), UsageError),
            (lambda: engine.query(question, chunks=[*held, one]), UsageError),
            (lambda: engine.compile_patches([one, one]), UsageError),
            (lambda: engine.evict(oldest=len(held) + 1), UsageError),
            (lambda: engine.evict([one, one]), UsageError),
        ]
        if self.shadow.left:
            gone = str(self.draw.choice(self.shadow.left))
            calls.append((lambda: engine.recall([gone], at=len(held) + 2), UsageError))
            calls.append((lambda: engine.recall([gone, gone]), UsageError))
            calls.append((lambda: engine.query(question, chunks=[gone]), NotFoundError))
            calls.append((lambda: engine.evict([gone]), NotFoundError))
        if self.shadow.purged:
            purged = str(self.draw.choice(sorted(self.shadow.purged)))
            calls.append((lambda: engine.recall([purged]), NotFoundError))
        call, error = self.draw.choice(calls)
        try:
            call()
        except error:
            return
        raise AssertionError(f"not refused: {error.__name__} expected")


class _Spy:
    """Collects the logits of every cold prefill with a cache."""

    def __init__(self, runner) -> None:
        self._runner, self._seen = runner, []

    def __enter__(self) -> list[torch.Tensor]:
        plain = self._runner.prefill

        def spy(segments):
            made = plain(segments)
            self._seen.append(made[1].clone())
            return made

        self._runner.prefill = spy
        return self._seen

    def __exit__(self, *_exc: object) -> None:
        del self._runner.prefill
