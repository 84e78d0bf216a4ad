"""Ask the same two-hop question over the same chunks in several orders; each order prefills once and is reused after.

Run: python examples/reorder.py
"""

import json
import tempfile
from pathlib import Path

from kamera_cli import Engine, Settings

HERE = Path(__file__).parent


def main() -> None:
    """Ingest the card video, then ask in three orders, twice each."""
    questions = json.loads((HERE / "cards.json").read_text())
    asked = next(question for question in questions if question["hops"] == 2)
    with tempfile.TemporaryDirectory() as folder, Engine(Settings(store=Path(folder) / "store")) as engine:
        chunks = engine.ingest([HERE / "cards.mp4"]).chunks
        numbers = [str(chunk.number) for chunk in chunks]
        print(f"{asked['question']}  (expected: {asked['answer']})")
        for order in (numbers[::-1], numbers[1:] + numbers[:1], numbers):
            for _ in range(2):
                result = engine.query(asked["question"], chunks=order, compare=True)
                used = " ".join(f"{chunk.number}:{chunk.used}" for chunk in result.chunks)
                cold = result.compare
                print(used)
                print(f"    {result.answer!r} in {result.ttft_ms:.0f} ms")
                print(f"    {cold.answer!r} in {cold.ttft_ms:.0f} ms by re-encoding, KL {cold.kl:.1e}")


if __name__ == "__main__":
    main()
