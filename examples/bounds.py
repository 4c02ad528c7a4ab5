"""What the bounds say: the published table, the sharp forms, the counterexample, a ladder; no trained model needed.

python examples/bounds.py [FOLDER]        # figures go to FOLDER, by default `bounds-example`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import probes
import theory
from stability.commands.bounds import run_regions
from stability.ladder import ladder, plot_ladder
from stability.model import Encoder, EncoderConfig

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "bounds-example")

# Appendix F.4 on the paper's own numbers for even pairs, 75th percentile; its table lists beta k = 6 with k = 5.
measured = {"dispersion_full": 2.03, "dispersion": 1.03, "separation": 0.009}
print("parameter stability, left-hand side:", theory.comparison.parameter_condition(**measured))
print("input stability, left-hand side:    ", theory.comparison.input_condition(**measured, sink_ratio=6 / 5))

# The published softmax bound against the sharp one: too low for a small dispersion, far too high for a large one.
for dispersion in (0.0, 1.0, 5.0, 88.0):
    published, sharp = (
        form(dispersion=dispersion, keys=5) for form in (theory.softmax.full, theory.softmax.full_sharp)
    )
    print(f"dispersion {dispersion:4g}: published {published:.3g}, sharp {sharp:.3g}")

published, sharp = theory.falsify.counterexample()
print(f"counterexample: measured / published {published.ratio:.3f}, measured / sharp {sharp.ratio:.3f}")
print(theory.explain("softmax-heavy-hitter-sharp"))

# The ladder of an untrained encoder's attention, from measured to worst case.
model = Encoder(EncoderConfig(tokens=6, classes=2, width=16, blocks=3, attention="topk:5")).eval()
with torch.no_grad(), probes.capture(model) as calls:
    model(torch.randint(0, 6, (1, 20), generator=torch.Generator().manual_seed(0)))
table = ladder(calls)
print(table.pivot(index="layer", columns="rung", values="value").round(1).to_string())
for path in run_regions(folder, force=True):
    print(path)
plot_ladder(table).figure.savefig(folder / "ladder.png", dpi=150)
print(folder / "ladder.png")
