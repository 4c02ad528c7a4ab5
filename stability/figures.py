"""Figures of training runs; each function takes and returns matplotlib Axes and never shows anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

STYLES = ("-", "--", "-.", ":")


def learning_curves(histories: Mapping[str, pd.DataFrame], ax: Axes | None = None, *, threshold: float = 0.95) -> Axes:
    """Draw training accuracy (thick) and held-out accuracy (thin) over the epochs of several runs.

    Args:
        histories: a history table (see `stability.runs.Run`) for each name.
        ax: where to draw; a new figure where omitted.
        threshold: a training accuracy to mark; the legend says when each run first reached it.

    Returns:
        The axes.
    """
    import matplotlib.pyplot as plt

    from stability.runs import epochs_to

    if ax is None:
        _, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for index, (name, history) in enumerate(histories.items()):
        style, color = STYLES[index % len(STYLES)], f"C{index}"
        reached = epochs_to(history, threshold)
        when = f"epoch {reached}" if reached is not None else "never"
        label = f"{name}, training ({threshold:.0%}: {when})"
        ax.plot(history["epoch"], 100 * history["train_accuracy"], style, color=color, linewidth=2, label=label)
        held_out = 100 * history["heldout_accuracy"]
        ax.plot(history["epoch"], held_out, style, color=color, linewidth=0.8, alpha=0.8, label=f"{name}, held out")
    ax.axhline(100 * threshold, color="0.5", linewidth=0.8, linestyle=(0, (1, 3)))
    ax.set(xlabel="epoch (counted from 1)", ylabel="accuracy (%)")
    ax.set_xlim(left=1)
    ax.grid(alpha=0.25)
    ax.legend(fontsize="small", framealpha=0.9)
    return ax
