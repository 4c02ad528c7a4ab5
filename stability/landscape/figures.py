"""Pictures of surfaces: log contours, heat maps, 3D, differences, and Lipschitz estimates by distance.

All take and return matplotlib Axes. Points that are not finite are drawn in their own colour, hatched, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, Normalize, TwoSlopeNorm
from matplotlib.patches import Patch

from stability.errors import UserError
from stability.landscape.surface import Surface

NOT_FINITE = "#d6336c"  # no colour of the maps used here
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v")
_UNITS = {"loss": "loss / nats", "accuracy": "accuracy", "gradient_norm": "norm of the gradient"}


def contour(
    surface: Surface,
    *,
    function: str = "loss",
    log: bool | None = None,
    levels: int | Float64[np.ndarray, " level"] = 12,
    ax: Axes | None = None,
) -> Axes:
    """Contour lines with labelled levels.

    Args:
        surface: a slice.
        function: which column.
        log: levels equally spaced in the logarithm; by default if all finite values are positive and span a factor of
            3.
        levels: how many, or the levels themselves.
        ax: where to draw.

    Returns:
        The axes.
    """
    ax = ax or plt.subplots(figsize=(5.2, 4.6), layout="constrained")[1]
    values = _finite(surface, function)
    if isinstance(levels, int):
        levels = contour_levels(values.compressed(), levels, log)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(levels)))  # the palest would vanish on white
    lines = ax.contour(surface.x, surface.y, values, levels=levels, colors=colours, linewidths=1.2)
    ax.clabel(lines, fmt=lambda level: f"{level:.2g}", fontsize=7)
    ax.plot(0, 0, "k+", markersize=9)
    _decorate(ax, surface, function)
    return ax


def heat_map(surface: Surface, *, function: str = "loss", log: bool | None = None, ax: Axes | None = None) -> Axes:
    """One coloured cell per grid point, with a colour bar.

    Args:
        surface: a slice.
        function: which column.
        log: logarithmic colours; by default if all finite values are positive and span a factor of 3.
        ax: where to draw.

    Returns:
        The axes.
    """
    ax = ax or plt.subplots(figsize=(5.8, 4.6), layout="constrained")[1]
    values = _finite(surface, function)
    shown = values.compressed()
    norm = LogNorm() if _logarithmic(shown, log) else Normalize()
    mesh = ax.pcolormesh(surface.x, surface.y, values, cmap="viridis", norm=norm, shading="nearest")
    ax.figure.colorbar(mesh, ax=ax, label=_UNITS.get(function, function))
    ax.plot(0, 0, "w+", markersize=9)
    _decorate(ax, surface, function)
    return ax


def surface_3d(surface: Surface, *, function: str = "loss", log: bool | None = None, ax: Any | None = None) -> Axes:
    """The surface in three dimensions; points that are not finite are marked on the floor.

    Args:
        surface: a slice.
        function: which column.
        log: heights are decimal logarithms; by default if all finite values are positive and span a factor of 3.
        ax: three-dimensional axes to draw on.

    Returns:
        The axes.
    """
    if ax is None:
        ax = plt.figure(figsize=(6, 5), layout="constrained").add_subplot(projection="3d")
    values = _finite(surface, function)
    logarithmic = _logarithmic(values.compressed(), log)
    heights = np.ma.log10(values) if logarithmic else values
    x, y = np.meshgrid(surface.x, surface.y)
    ax.plot_surface(x, y, heights.filled(np.nan), cmap="viridis", linewidth=0, antialiased=True)
    missing = np.ma.getmaskarray(values)
    if missing.any():
        floor = np.full(int(missing.sum()), heights.min() if heights.count() else 0.0)
        ax.scatter(
            x[missing], y[missing], floor, color=NOT_FINITE, marker="x", label=f"not finite ({missing.sum()} points)"
        )
        ax.legend(loc="upper left", fontsize=8)
    label = _UNITS.get(function, function)
    zlabel = f"log10 {label}" if logarithmic else label
    ax.set(xlabel="x / grid units", ylabel="y / grid units", zlabel=zlabel)
    ax.set_title(surface.metadata.get("name", ""))
    return ax  # type: ignore[no-any-return]


def contours(
    surfaces: Mapping[str, Surface], *, function: str = "loss", log: bool | None = None, levels: int = 12
) -> list[Axes]:
    """Contours of several models side by side, at the same levels.

    Args:
        surfaces: by the name of the model.
        function: which column.
        log: as in `contour`, decided over all surfaces together.
        levels: how many.

    Returns:
        One Axes per model, in one figure.

    Raises:
        UserError: if there is no surface.
    """
    if not surfaces:
        raise UserError("Expected at least one surface to draw, but got none.")
    _, axes = plt.subplots(
        1,
        len(surfaces),
        figsize=(4.9 * len(surfaces), 4.6),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    everything = np.concatenate([_finite(surface, function).compressed() for surface in surfaces.values()])
    shared = contour_levels(everything, levels, log)
    for ax, (name, surface) in zip(axes[0], surfaces.items(), strict=True):
        contour(surface, function=function, levels=shared, ax=ax)
        ax.set_title(f"{name}\n{_subtitle(surface, function)}", fontsize=10)
    return list(axes[0])


def difference(first: Surface, second: Surface, *, function: str = "loss", ax: Axes | None = None) -> Axes:
    """First minus second, point by point, with colours centred at 0.

    Args:
        first: a slice.
        second: a slice over the same grid.
        function: which column.
        ax: where to draw.

    Returns:
        The axes.

    Raises:
        UserError: if the two grids differ.
    """
    if first.x.shape != second.x.shape or not (np.allclose(first.x, second.x) and np.allclose(first.y, second.y)):
        raise UserError("Expected two surfaces over the same grid, but their coordinates differ; trace both alike.")
    ax = ax or plt.subplots(figsize=(5.8, 4.6), layout="constrained")[1]
    values = np.ma.masked_invalid(
        np.asarray(_finite(first, function).filled(np.nan) - _finite(second, function).filled(np.nan))
    )
    span = float(np.abs(values).max()) if values.count() else 1.0
    norm = TwoSlopeNorm(0.0, -(span or 1.0), span or 1.0)
    mesh = ax.pcolormesh(first.x, first.y, values, cmap="RdBu_r", norm=norm, shading="nearest")
    names = [surface.metadata.get("name", default) for surface, default in ((first, "first"), (second, "second"))]
    ax.figure.colorbar(mesh, ax=ax, label=f"{_UNITS.get(function, function)}: {names[0]} minus {names[1]}")
    if values.count() and values.min() < 0 < values.max():
        ax.contour(first.x, first.y, values, levels=[0.0], colors="k", linewidths=1)
    _mark_missing(ax, first, np.ma.getmaskarray(values))
    ax.set(
        xlabel=_axis_label(first, 0), ylabel=_axis_label(first, 1), aspect="equal", title=f"{names[0]} minus {names[1]}"
    )
    return ax


def profile(surfaces: Mapping[str, Surface], *, function: str = "loss", ax: Axes | None = None) -> Axes:
    """Lines (one direction, or the segment between two models), several in one picture.

    Args:
        surfaces: lines by name.
        function: which column.
        ax: where to draw.

    Returns:
        The axes; points that are not finite are marked at the bottom.
    """
    ax = ax or plt.subplots(figsize=(6, 4.2), layout="constrained")[1]
    for number, (name, surface) in enumerate(surfaces.items()):
        values = surface.grid(function)[0]
        style = _STYLES[number % len(_STYLES)]
        ax.plot(surface.x, np.where(np.isfinite(values), values, np.nan), style, label=name)
        missing = surface.x[~np.isfinite(values)]
        if len(missing):
            label = f"{name}: not finite ({len(missing)} points)"
            transform = ax.get_xaxis_transform()
            ax.plot(
                missing, np.zeros(len(missing)), "x", color=NOT_FINITE, transform=transform, label=label, clip_on=False
            )
    along = "position from the first model (0) to the second (1)"
    kinds = {surface.metadata.get("kind") for surface in surfaces.values()}
    first = next(iter(surfaces.values()))
    ax.set(xlabel=along if kinds == {"between"} else _axis_label(first, 0), ylabel=_UNITS.get(function, function))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return ax


def lipschitz_curves(
    tables: Mapping[str, pd.DataFrame],
    *,
    function: str = "loss",
    unit: str = "parameter",
    marks: tuple[str, ...] = ("p50", "p95", "max"),
    ax: Axes | None = None,
) -> Axes:
    """Lipschitz estimates by distance from the centre, several models in one picture.

    Args:
        tables: `lipschitz.estimate` of each model, by its name.
        function: which function.
        unit: "grid" or "parameter".
        marks: which percentiles; each has its own line style, each model its own colour and marker.
        ax: where to draw.

    Returns:
        The axes.

    Raises:
        UserError: if a table holds no such rows.
    """
    ax = ax or plt.subplots(figsize=(6, 4.4), layout="constrained")[1]
    for number, (name, table) in enumerate(tables.items()):
        rows = table[(table["function"] == function) & (table["unit"] == unit)].sort_values("radius")
        if rows.empty:
            raise UserError(
                f"Expected Lipschitz estimates of {function} per {unit} unit for {name}, but the table has none."
            )
        for style, mark in zip(_STYLES * len(marks), marks, strict=False):
            label = f"{name}, {'maximum' if mark == 'max' else f'{mark[1:]}th percentile'}"
            marker = _MARKERS[number % len(_MARKERS)]
            ax.plot(rows["radius"], rows[mark], style, color=f"C{number}", marker=marker, markersize=3.5, label=label)
    per = r"$\|\Delta\Theta\|_2$" if unit == "parameter" else "grid unit"
    ax.set(xlabel=f"distance from the centre / {per}", ylabel=f"|difference of {function}| per {per} (lower bound)")
    low, high = ax.dataLim.intervaly
    if low > 0 and high > 3 * low:
        ax.set_yscale("log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return ax


def contour_levels(
    values: Float64[np.ndarray, " value"], count: int = 12, log: bool | None = None
) -> Float64[np.ndarray, " level"]:
    """Levels for contours that can be shared between pictures.

    Args:
        values: finite values to cover.
        count: how many levels at most.
        log: equally spaced in the logarithm; by default if all values are positive and span a factor of 3.

    Returns:
        Ascending distinct levels, rounded to two digits, strictly inside the range where possible.
    """
    if not values.size or values.min() == values.max():
        return np.array([float(values[0]) if values.size else 0.0])
    if _logarithmic(values, log):
        raw = np.geomspace(values[values > 0].min(), values.max(), count + 2)[1:-1]
    else:
        raw = np.linspace(values.min(), values.max(), count + 2)[1:-1]
    rounded = np.unique([float(f"{level:.2g}") for level in raw])
    # Rounding to two digits merges levels of a nearly constant function.
    return rounded if len(rounded) > count // 2 else np.unique(raw)


def _logarithmic(values: Float64[np.ndarray, " value"], log: bool | None) -> bool:
    if not (values > 0).any():
        return False
    return bool(values.min() > 0 and values.max() > 3 * values.min()) if log is None else log


def _finite(surface: Surface, function: str) -> Any:
    return np.ma.masked_invalid(surface.grid(function))


def _axis_label(surface: Surface, axis: int) -> str:
    norms = surface.direction_norms
    unit = rf" (1 unit: $\|\Delta\Theta\|_2$ = {norms[axis]:.3g})" if len(norms) > axis else " / grid units"
    return f"direction {'xy'[axis]}{unit}"


def _subtitle(surface: Surface, function: str) -> str:
    center = surface.center.get(function)
    return f"{function} at the centre {center:.4g}" if center is not None else function


def _mark_missing(ax: Axes, surface: Surface, missing: Any) -> None:
    if missing.any():
        cells = np.ma.masked_array(np.ones(missing.shape), ~missing)
        colour = ListedColormap([NOT_FINITE])
        ax.pcolor(surface.x, surface.y, cells, cmap=colour, hatch="xx", shading="nearest", zorder=0.5)
        patch = Patch(facecolor=NOT_FINITE, hatch="xx", label=f"not finite ({missing.sum()} points)")
        ax.legend(handles=[patch], loc="upper right", fontsize=8)


def _decorate(ax: Axes, surface: Surface, function: str) -> None:
    _mark_missing(ax, surface, np.ma.getmaskarray(_finite(surface, function)))
    ax.set(xlabel=_axis_label(surface, 0), ylabel=_axis_label(surface, 1), aspect="equal")
    name = surface.metadata.get("name")
    ax.set_title(f"{name}\n{_subtitle(surface, function)}" if name else _subtitle(surface, function), fontsize=10)
