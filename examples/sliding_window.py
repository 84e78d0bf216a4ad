"""Slide a window over the card video: old chunks leave, the survivors only move; then the first one is recalled.

Run: python examples/sliding_window.py
"""

import json
import tempfile
from pathlib import Path

from kamera_cli import Engine, Settings

HERE = Path(__file__).parent


def main() -> None:
    """Evict the oldest chunk twice, then recall the first; the vision tower runs during ingest alone."""
    questions = json.loads((HERE / "cards.json").read_text())
    asked = next(
        question for question in questions if question["chunks"] == [2, 6] and question["answer"] == "seven"
    )
    with tempfile.TemporaryDirectory() as folder, Engine(Settings(store=Path(folder) / "store")) as engine:
        engine.ingest([HERE / "cards.mp4"])
        engine.compile_patches()
        calls = engine.runner.vision_calls
        print(f"{asked['question']}  (expected: {asked['answer']}; it takes chunks 2 and 6)")
        for _ in range(2):
            moved = engine.evict(oldest=1)
            show("evicted", moved.evicted, moved.window)
            answer(engine, asked["question"])
        print("    chunk 6 was prefilled when chunk 2 stood before it, and keeps what it took in")
        back = engine.recall(["1"])
        show("recalled", back.recalled, back.window)
        print(f"    patches formed: {len(back.patched)}")
        answer(engine, asked["question"])
        print(f"vision tower forwards since ingest: {engine.runner.vision_calls - calls}")


def answer(engine: Engine, question: str) -> None:
    """One line: the answer, its time and what was reused."""
    result = engine.query(question)
    print(f"    {result.answer!r} in {result.ttft_ms:.0f} ms, {result.reused_tokens} tokens reused")


def show(what: str, entries: tuple, window: object) -> None:
    """One line: what moved and what the window holds now."""
    moved = " ".join(str(entry.number) for entry in entries)
    held = " ".join(str(entry.number) for entry in window.entries)
    print(f"{what} {moved}; the window holds {held}")


if __name__ == "__main__":
    main()
