"""Write ``examples/cards.mp4`` and ``examples/cards.json`` and check every answer with the shipped model.

Run: ``python examples/tiny_model/make_cards.py``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import av
import numpy as np
import torch
from reader import Reader

from kamera_cli.tiny import model_path
from kamera_cli.tiny.render import write_video
from kamera_cli.tiny.world import episode

SEED, NUM_CHUNKS, CHUNK_SECONDS, SAMPLE_FPS = 276, 6, 8, 2


def sample_video(path: Path) -> list[np.ndarray]:
    """Decode the frames nearest to each half second, and cut them into chunks of 8 s."""
    with av.open(str(path)) as container:
        frames = [(float(f.time), f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
    times = np.array([time for time, _ in frames])
    wanted = np.arange(0, NUM_CHUNKS * CHUNK_SECONDS, 1 / SAMPLE_FPS)
    picked = np.stack([frames[int(np.abs(times - t).argmin())][1] for t in wanted])
    return np.split(picked, NUM_CHUNKS)


def main() -> None:
    """Write both files; raise ``SystemExit`` when the model answers a question wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--model", type=Path, default=model_path())
    parser.add_argument(
        "--seed", type=int, default=SEED, help="episode of the split that is kept for this file"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    item = episode(args.seed, num_chunks=NUM_CHUNKS, split="example")
    video = args.folder / "cards.mp4"
    write_video(video, item, fps=24, crf=30, size=448, seed=args.seed)
    rows = [
        {"question": q.text, "answer": q.answer, "hops": q.hops, "chunks": [i + 1 for i in q.chunks]}
        for q in item.questions
    ]
    (args.folder / "cards.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    with torch.inference_mode():
        reader = Reader(args.model)
        prompt = reader.prompt(sample_video(video))
        kv = [(k[0], v[0]) for k, v in reader.capture(prompt.embeddings[None], prompt.positions[:, None])]
        texts, _ = reader.answers(prompt, kv, item.questions)
    wrong = [
        (q.text, q.answer, text) for q, text in zip(item.questions, texts, strict=True) if text != q.answer
    ]
    if wrong:
        raise SystemExit(f"seed {args.seed}: the model's answers differ: {wrong}")


if __name__ == "__main__":
    main()
