"""Train `kamera-tiny` on one CPU core: first the eye, then the mind.

The *eye* stage teaches the vision tower to name what is on a card. Its outputs for the whole bank are then
computed once, and the *mind* stage trains the language model on them. Needs banks (``bank.py``) and an
untrained model (``build_processor.py``)::

    python bank.py bank.npz
    python bank.py bank2.npz --seed 8
    python build_processor.py start
    python train.py eye --bank bank.npz bank2.npz --model start --out run --steps 2900
    python train.py mind --model start --out run --minutes 75

The mind stage can be stopped and started again; ``run/model`` is a complete checkpoint folder at any time.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from eye import EYE_LR, EYE_STEPS, train_eye
from mind import MIND_LR, train_mind


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["eye", "mind"])
    parser.add_argument("--bank", type=Path, nargs="+", default=[], help="banks for the eye stage")
    parser.add_argument("--model", type=Path, required=True, help="untrained model with its processor")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=75, help="wall time of the mind stage, over all restarts"
    )
    parser.add_argument("--steps", type=int, default=EYE_STEPS, help="steps of the eye stage")
    parser.add_argument("--lr", type=float, help=f"peak rate of Muon; eye {EYE_LR}, mind {MIND_LR}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    {"eye": train_eye, "mind": train_mind}[args.stage](args)


if __name__ == "__main__":
    main()
