"""Figures of a what-if table: what selections keep and lose, and what they do to the dispersion.

A table without the column or the rows that a figure needs is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

MARKERS = "osD^vP*X<>hpd"
LINES = ("-", "--", "-.", ":")
LABELS = {
    "dispersion": "dispersion (nats)",
    "separation": "separation (nats)",
    "sink_ratio": "sink ratio",
    "kept_share": "kept share of the allowed keys",
    "tail_mass": "tail mass = total-variation error",
    "tail_mass_bound": "certificate of the tail mass",
    "output_error": "relative output error",
}


def frontier(table: pd.DataFrame, *, scope: str = "model", y: str = "tail_mass", ax: Axes | None = None) -> Axes:
    """Kept share against tail mass, one marker a selection: further down and to the left is better.

    Args:
        table: from `probes.what_if`.
        scope: which rows to draw, `model`, `layer` or `head`.
        y: another column for the vertical axis, such as `output_error`.
        ax: where to draw; a new figure where omitted.

    Returns:
        The axes.
    """
    rows = _rows(table, scope, ["kept_share", y])
    ax = plt.subplots(figsize=(6.4, 4.8), layout="constrained")[1] if ax is None else ax
    names = [name for name in rows["selection"].unique() if name not in ("full", "observed")]
    shades = plt.get_cmap("cividis")(np.linspace(0, 0.9, max(len(names), 1)))
    for number, name in enumerate(names):
        part = rows[rows["selection"] == name]
        ax.scatter(
            part["kept_share"], part[y], s=50 if scope == "model" else 18, marker=MARKERS[number % len(MARKERS)],
            color=shades[number], edgecolor="black", linewidth=0.5, label=name,
        )  # fmt: skip
    ax.set(xlabel=LABELS["kept_share"], ylabel=LABELS.get(y, y), xlim=(0, 1))
    if (rows.loc[rows["selection"].isin(names), y] > 0).any():
        ax.set_yscale("log")
    ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def by_layer(
    table: pd.DataFrame, *, column: str = "dispersion", selections: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """One quantity layer by layer, heads pooled, one line a selection.

    Args:
        table: from `probes.what_if`.
        column: the quantity.
        selections: which ones to draw; all where omitted.
        ax: where to draw; a new figure where omitted.

    Returns:
        The axes.
    """
    rows = _rows(table, "layer", [column], selections)
    ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")[1] if ax is None else ax
    modules = list(rows["module"].unique())
    names = list(rows["selection"].unique())
    shades = plt.get_cmap("cividis")(np.linspace(0, 0.9, len(names)))
    for number, name in enumerate(names):
        values = rows[rows["selection"] == name].set_index("module")[column].reindex(modules)
        ax.plot(
            range(len(modules)), values, marker=MARKERS[number % len(MARKERS)], linestyle=LINES[number % len(LINES)],
            color=shades[number], label=name,
        )  # fmt: skip
    ax.set(xlabel="layer", ylabel=_label(rows, column), xticks=range(len(modules)))
    ax.set_xticklabels(_layer_names(rows, modules))
    ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def heat_map(table: pd.DataFrame, selection: str, *, column: str = "dispersion", ax: Axes | None = None) -> Axes:
    """One quantity under one selection, heads against layers.

    Args:
        table: from `probes.what_if`.
        selection: its short name.
        column: the quantity.
        ax: where to draw; a new figure where omitted.

    Returns:
        The axes.
    """
    rows = _rows(table, "head", [column], [selection])
    modules = list(rows["module"].unique())
    grid = rows.pivot(index="module", columns="head", values=column).loc[modules].to_numpy(float)
    ax = plt.subplots(figsize=(6.4, 4.8), layout="constrained")[1] if ax is None else ax
    image = ax.imshow(grid, aspect="auto", cmap="cividis", origin="lower")
    ax.figure.colorbar(image, ax=ax, label=_label(rows, column))
    ax.set(xlabel="head", ylabel="layer", yticks=range(len(modules)), xticks=range(grid.shape[1]), title=selection)
    ax.set_yticklabels(_layer_names(rows, modules))
    return ax


def _rows(table: pd.DataFrame, scope: str, columns: list[str], selections: Sequence[str] | None = None) -> pd.DataFrame:
    missing = [name for name in ("scope", "module", "selection", *columns) if name not in table.columns]
    if missing:
        raise ValueError(f"Expected a table of probes.what_if, but it lacks the columns {', '.join(missing)}.")
    rows = table[table["scope"] == scope]
    if selections is not None:
        rows = rows[rows["selection"].isin(list(selections))]
    if rows.empty:
        wanted = "" if selections is None else f" of {', '.join(selections)}"
        there = ", ".join(table["selection"].unique()) or "nothing"
        raise ValueError(f"Expected rows of scope {scope!r}{wanted}, but the table holds {there}.")
    return rows


def _label(rows: pd.DataFrame, column: str) -> str:
    label = LABELS.get(column, column)
    if column in ("dispersion", "separation", "sink_ratio") and "percentile" in rows:
        q = int(rows["percentile"].iloc[0])
        return f"{label}, percentile {100 - q if column == 'separation' else q}"
    return label


def _layer_names(rows: pd.DataFrame, modules: list[str]) -> list[str]:
    layers = [rows.loc[rows["module"] == module, "layer"].iloc[0] for module in modules]
    if any(pd.isna(layer) for layer in layers) or len(set(layers)) < len(layers):
        return modules
    return [str(layer) for layer in layers]
