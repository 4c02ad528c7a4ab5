"""Run every architecture against its own weights and write docs/architectures.md from what came out.

python tests/probes/write_architectures.py
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from architectures import ARCHITECTURES
from check_architecture import check

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
HOW = dict.fromkeys(("eager", "sdpa"), "library interface") | {
    "fused": "torch's attention",
    "softmax": "its own softmax",
}


def page() -> str:
    """The page, from a fresh run."""
    lines = [
        "# Architectures that capture is checked on",
        "",
        "Written by `python tests/probes/write_architectures.py`; not edited by hand. Each model is built at random",
        "from a configuration, with weights large enough that attention is not flat, and run with no, left and right",
        "padding where it takes text. *Weights*: largest difference between softmax of the captured logits and the",
        "model's own attention weights on rows with an allowed key. *Keys*: the allowed keys are exactly those with",
        "weight. *Statistics*: largest difference (nats) of dispersion and separation from a loop over the logarithms",
        "of the model's own weights. *Unchanged*: outputs are bit-identical with and without the probe.",
        "",
        f"torch {torch.__version__}, transformers {version('transformers')}, float32.",
        "",
        "| architecture | code | captured through | kinds | calls | weights | keys | statistics | unchanged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for architecture in ARCHITECTURES:
        for implementation in architecture.implementations:
            found = [check(architecture, implementation, padding) for padding in architecture.paddings]
            how = ", ".join(HOW[name] for name in found[0].how)
            lines.append(
                f"| {architecture.name} | {implementation} | {how} | {', '.join(found[0].kinds)} | {found[0].calls} "
                f"| {max(f.weights for f in found):.0e} | {_word(all(f.keys for f in found))} "
                f"| {max(f.statistics for f in found):.0e} | {_word(all(f.unchanged for f in found))} |"
            )
    lines += [
        "",
        "Falcon with ALiBi applies its bias twice in the library's eager code and once under sdpa; what runs is",
        "measured, and under sdpa the comparison is with the output of torch's own attention.",
        "",
    ]
    return "\n".join(lines)


def _word(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
