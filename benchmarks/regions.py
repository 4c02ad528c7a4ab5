"""The region figures of Appendix F.4: closed form against a grid scan, side by side.

The scan renders the method of the paper's released script in our own words: for each dispersion and each c1, try c2 on
a grid with the same step and take the first value that satisfies the inequality. Both sides compute numbers only;
nothing is drawn. Eleven dispersions; (276), and (277) with six sink ratios.

    python benchmarks/regions.py [--step 1e-3] [--repeat 3]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from theory import comparison, plots

RESULTS = Path(__file__).parent / "results" / "regions.md"
HEADER = (
    "| step | closed form, s | grid scan, s | ratio | largest difference in c2 |\n| --- | --- | --- | --- | --- |\n"
)


def closed_form(step: float) -> list[np.ndarray]:
    """Evaluate the boundary for all dispersions, of (276) and of (277) for all sink ratios."""
    found = [plots.region(comparison.parameter, precision=step)[1]]
    found += [plots.region(comparison.input, precision=step, sink_ratio=ratio)[1] for ratio in plots.SINK_RATIOS]
    return found


def grid_scan(step: float) -> list[np.ndarray]:
    """Find the same by trying c2 in (0, 1] on a grid; infinity where none in it satisfies the inequality."""
    axis = np.arange(1, round(1 / step)) * step
    candidates = np.arange(1, round(1 / step) + 1) * step
    found = []
    for sink_ratio in (None, *plots.SINK_RATIOS):
        edges = np.full((len(plots.DISPERSIONS), len(axis)), np.inf)
        for row, full in enumerate(plots.DISPERSIONS):
            for column, c1 in enumerate(axis):
                gap = 1 + 1 / (full * candidates)
                if sink_ratio is None:
                    left = c1 + np.log(2 * gap) / full
                else:
                    left = c1 + np.log(full * (1 + sink_ratio) * gap + sink_ratio) / full - np.log(full + 1) / full
                holds = np.flatnonzero(left <= 1)
                if len(holds):
                    edges[row, column] = candidates[holds[0]]
        found.append(edges)
    return found


def timed(function, step: float, repeat: int) -> tuple[float, list[np.ndarray]]:
    """Run a function a few times; the fastest run counts."""
    best, result = np.inf, []
    for _ in range(repeat):
        start = time.perf_counter()
        result = function(step)
        best = min(best, time.perf_counter() - start)
    return best, result


def main() -> None:
    """Measure, print and add a row to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=float, default=1e-3, help="spacing of c1 and of the scan's c2")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    closed_form(0.1)  # sympy builds the two formulas once
    ours, exact = timed(closed_form, options.step, options.repeat)
    theirs, scanned = timed(grid_scan, options.step, options.repeat)
    pairs = [(scan[np.isfinite(scan)], edge[np.isfinite(scan)]) for scan, edge in zip(scanned, exact, strict=True)]
    apart = max(float((scan - edge).max(initial=0)) for scan, edge in pairs)
    row = f"| {options.step:g} | {ours:.3f} | {theirs:.2f} | {theirs / ours:.0f} | {apart:.2g} |\n"
    print(HEADER + row, end="")
    RESULTS.parent.mkdir(exist_ok=True)
    if not RESULTS.exists():
        title = "# Region figures of Appendix F.4\n\n"
        title += "One row a run of `benchmarks/regions.py`, both sides in the same process on a shared 2-core CPU.\n\n"
        RESULTS.write_text(title + HEADER)
    with RESULTS.open("a") as file:
        file.write(row)


if __name__ == "__main__":
    main()
