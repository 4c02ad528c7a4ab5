"""Pictures of measurement tables. Each function takes and returns matplotlib Axes and shows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MARKERS = "osD^vP*X<>"
GREYS = ("0.1", "0.45", "0.65", "0.3", "0.55")
LABELS = {
    "dispersion": "dispersion [nats]",
    "separation": "separation [nats]",
    "sink_ratio": "sink ratio (queries per key / keys per query)",
    "queries_per_key": "queries per key",
    "kept": "keys per query",
    "entropy": "entropy [nats]",
    "max_logit": "largest logit [nats]",
    "max_abs_logit": "largest |logit| [nats]",
    "largest_probability": "largest attention weight",
    "tail_mass": "attention mass left out",
    "tail_mass_bound": "bound on the attention mass left out",
    "attention_received": "attention mass received per key",
    "jacobian_1_norm": "softmax Jacobian, norm 1 to 1",
    "jacobian_inf_1_norm": "softmax Jacobian, norm inf to 1",
}


def statistic(table: pd.DataFrame, metric: str, ax: Axes | None = None, *, low: str = "p5", high: str = "p95") -> Axes:
    """Draw one metric per layer and head: a mark at each head's median, a bar from one percentile to another.

    Args:
        table: a measurement table.
        metric: which metric.
        ax: where to draw; new axes where omitted.
        low: the column at the bar's lower end.
        high: the column at its upper end.

    Returns:
        The axes.

    Raises:
        ValueError: if the table has no rows for heads and this metric.
    """
    rows = table[(table["scope"] == "head") & (table["metric"] == metric) & (table["count"] > 0)]
    if rows.empty:
        known = ", ".join(sorted(set(table["metric"]))) or "none"
        raise ValueError(
            f"Expected a table with heads' rows of the metric {metric!r}, but it has none; its metrics: {known}."
        )
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    modules = list(dict.fromkeys(rows["module"]))
    groups = list(dict.fromkeys(zip(rows["model"], rows["selection"], strict=True)))
    several = rows["model"].nunique() > 1
    for number, (model, selection) in enumerate(groups):
        chosen = rows[(rows["model"] == model) & (rows["selection"] == selection)]
        heads = chosen["head"].astype(int).to_numpy()
        layer = chosen["module"].map({name: i for i, name in enumerate(modules)}).to_numpy(dtype=float)
        width = 0.8 / len(groups)
        inside = (heads + 0.5) / (heads.max() + 1)
        x = layer - 0.4 + width * (number + inside)
        colour, marker = GREYS[number % len(GREYS)], MARKERS[number % len(MARKERS)]
        middle = chosen["p50"].to_numpy()
        ax.vlines(x, chosen[low].to_numpy(), chosen[high].to_numpy(), color=colour, lw=1)
        label = f"{model}, {selection}" if several else selection
        ax.plot(x, middle, ls="", marker=marker, ms=4, color=colour, label=label)
    _layer_axis(ax, rows, modules)
    ax.set_ylabel(LABELS.get(metric, metric))
    ax.legend(title=f"median; bars: {low} to {high}", fontsize="small", title_fontsize="small")
    return ax


def _layer_axis(ax: Any, rows: pd.DataFrame, modules: list[str]) -> None:
    layers = [rows.loc[rows["module"] == name, "layer"].iloc[0] for name in modules]
    numbered = len({str(layer) for layer in layers}) == len(modules)
    ax.set_xticks(np.arange(len(modules)))
    if numbered:
        ax.set_xticklabels([str(layer) for layer in layers])
    else:
        ax.set_xticklabels(modules, rotation=45, ha="right", fontsize="x-small")
    ax.set_xlabel("layer (its heads from left to right)")
    ax.set_xlim(-0.6, len(modules) - 0.4)
    ax.grid(axis="y", lw=0.4, alpha=0.5)


def dispersion(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Dispersion per layer and head; see `statistic`.

    Args:
        table: a measurement table.
        ax: where to draw; new axes where omitted.

    Returns:
        The axes.
    """
    return statistic(table, "dispersion", ax)


def separation(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Separation per layer and head; see `statistic`.

    Args:
        table: a measurement table.
        ax: where to draw; new axes where omitted.

    Returns:
        The axes.
    """
    return statistic(table, "separation", ax)


def sink_ratio(table: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Sink ratio per layer and head; see `statistic`.

    Args:
        table: a measurement table.
        ax: where to draw; new axes where omitted.

    Returns:
        The axes.
    """
    return statistic(table, "sink_ratio", ax)
