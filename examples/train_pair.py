"""Train the paper's encoder on even pairs with full and with top-5 attention, from the same start, and compare.

Run: python examples/train_pair.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import stability
from stability.figures import learning_curves


def main(out: Path) -> None:
    """Train both models, print when each first reached 95 % training accuracy, and draw the learning curves."""
    runs = {}
    for name, attention in (("full", "full"), ("top-5", "topk:5")):
        run = stability.train("even-pairs", attention, seed=140439608, out=out / name, epochs=100, stop_at=0.99)
        print(f"{name}: 95 % training accuracy at epoch {run.epochs_to(0.95)}; run folder {run.folder}")
        runs[name] = run.history
    axes = learning_curves(runs)
    axes.figure.savefig(out / "learning.png", dpi=150)
    print(f"learning curves: {out / 'learning.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/pair"))
