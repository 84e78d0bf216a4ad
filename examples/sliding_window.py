"""Slide a window over the card video: old chunks leave, the survivors only move; then the first one is recalled.

Run: python examples/sliding_window.py
"""

import tempfile
from pathlib import Path

from kamera_cli.engine import Engine
from kamera_cli.settings import Settings

VIDEO = Path(__file__).with_name("cards.mp4")


def main() -> None:
    """Evict the oldest chunk twice, then recall it; the vision tower runs during ingest alone."""
    with tempfile.TemporaryDirectory() as folder, Engine(Settings(store=Path(folder) / "store")) as engine:
        engine.ingest([VIDEO])
        engine.compile_patches()
        calls = engine.runner.vision_calls
        for _ in range(2):
            moved = engine.evict(oldest=1)
            show("evicted", moved.evicted, moved.window)
            result = engine.query("which digit comes with the letter a?")
            print(f"    {result.answer!r} in {result.ttft_ms:.0f} ms, {result.reused_tokens} tokens reused")
        back = engine.recall(["1"])
        show("recalled", back.recalled, back.window)
        print(f"    patches formed: {len(back.patched)}, chunks whose patches name it: {len(back.cascade)}")
        result = engine.query("which digit comes with the letter a?")
        print(f"    {result.answer!r} in {result.ttft_ms:.0f} ms, {result.reused_tokens} tokens reused")
        print(f"vision tower forwards since ingest: {engine.runner.vision_calls - calls}")


def show(what: str, entries: tuple, window: object) -> None:
    """One line: what moved and what the window holds now."""
    moved = " ".join(str(entry.number) for entry in entries)
    held = " ".join(str(entry.number) for entry in window.entries)
    print(f"{what} {moved}; the window holds {held}")


if __name__ == "__main__":
    main()
