r"""Slopes between neighbouring points of a surface, by distance from its centre.

The slope between two neighbours is :math:`|f(a) - f(b)| / \|a - b\|`, with the distance once in grid units (as in the
paper's figure [1]) and once in parameter distance :math:`\|\Delta\Theta\|_2`, which does not depend on how the
directions were scaled.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64

from stability.errors import UserError
from stability.landscape.surface import Surface

PERCENTILES = (50, 75, 95, 99)
UNITS = ("grid", "parameter")
WINDOWS = ("disc", "square")
COLUMNS = ("function", "unit", "radius", "count", "undefined", "p50", "p75", "p95", "p99", "max", "bound")


@dataclass(frozen=True)
class Slopes:
    """Slopes of one function between neighbours, in one unit.

    Attributes:
        slope: one per pair of neighbours; not finite where a value is missing, NaN or infinite.
        reach: distance from the centre of the pair's farther point, in the same unit.
    """

    slope: Float64[np.ndarray, " pair"]
    reach: Float64[np.ndarray, " pair"]


def estimate(
    surface: Surface,
    *,
    radii: Sequence[float] | None = None,
    functions: Iterable[str] | None = None,
    window: str = "disc",
) -> pd.DataFrame:
    r"""Estimate Lipschitz constants from a surface, by distance from its centre.

    A pair of neighbours (along either direction) counts at radius r if both of its points lie within r of the centre.

    Args:
        surface: a slice or a line.
        radii: in grid units; by default every positive coordinate of the grid.
        functions: which columns; all by default.
        window: "disc" measures the distance from the centre as Euclidean; "square" takes all points with
            :math:`|x|, |y| \le r`, as the paper's scripts do.

    Returns:
        One row per function, unit and radius: percentiles and maximum of the slopes, how many there are, and how many
        are undefined because a value is not finite. In unit "grid" slopes are per grid unit and `radius` is in grid
        units; in unit "parameter" slopes are per unit of parameter distance and `radius` is the parameter distance
        :math:`r \max(\|d_x\|, \|d_y\|)`; these rows are absent if the directions' norms are not known. `bound` says
        that a sample gives a lower bound.

    Raises:
        UserError: if a function is unknown, `window` is, or a radius is not positive.
    """
    chosen = tuple(functions) if functions is not None else surface.functions
    if window not in WINDOWS:
        raise UserError(f"Expected `window` to be disc or square, but got {window!r}.")
    along = np.array(sorted(radii), float) if radii is not None else np.unique(np.abs([*surface.x, *surface.y]))
    along = along if radii is not None else along[along > 0]
    if not (len(along) and (along > 0).all()):
        raise UserError(
            f"Expected positive radii, but got {list(radii) if radii is not None else 'a surface of one point'}."
        )
    norms = surface.direction_norms
    rows = []
    for function in chosen:
        for unit in UNITS if norms else UNITS[:1]:
            slopes = neighbour_slopes(surface, function, unit=unit, window=window)
            for radius in along * (max(norms) if unit == "parameter" else 1.0):
                # The tolerance keeps the points of the edge, whose coordinates carry rounding errors.
                inside = slopes.slope[slopes.reach <= radius * (1 + 1e-9)]
                rows.append({"function": function, "unit": unit, "radius": float(radius), **summary(inside)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def neighbour_slopes(surface: Surface, function: str, *, unit: str = "parameter", window: str = "disc") -> Slopes:
    """Slopes between all neighbours of a grid.

    Args:
        surface: a slice or a line.
        function: a column.
        unit: "grid" or "parameter".
        window: how the distance from the centre is measured, "disc" or "square".

    Returns:
        The slopes along x, then along y.

    Raises:
        UserError: if the surface does not know the norms of its directions and `unit` is "parameter".
    """
    scales = (1.0, 1.0) if unit == "grid" else surface.direction_norms
    if not scales:
        raise UserError(
            "Expected a surface that knows its directions' norms for slopes by parameter distance; use unit='grid'."
        )
    values, x, y = surface.grid(function), surface.x, surface.y
    if window == "square":
        reach = np.maximum(np.abs(x)[None, :], np.abs(y)[:, None]) * max(scales)
    elif unit == "grid":
        reach = np.hypot(x[None, :], y[:, None])
    else:
        reach = surface.grid("distance")
    with np.errstate(invalid="ignore"):
        along_x = np.abs(np.diff(values, axis=1)) / (np.diff(x) * scales[0])[None, :]
        along_y = np.abs(np.diff(values, axis=0)) / (np.diff(y) * scales[-1])[:, None]
    farther_x, farther_y = np.maximum(reach[:, 1:], reach[:, :-1]), np.maximum(reach[1:], reach[:-1])
    return Slopes(
        np.concatenate([along_x.ravel(), along_y.ravel()]), np.concatenate([farther_x.ravel(), farther_y.ravel()])
    )


def summary(slopes: Float64[np.ndarray, " pair"]) -> dict[str, float | int | str]:
    """Percentiles of slopes, with what they rest on.

    Args:
        slopes: one per pair; those that are not finite are counted as undefined and left out.

    Returns:
        count, undefined, the percentiles (numpy's linear interpolation; NaN if nothing is left), max, bound.
    """
    finite = slopes[np.isfinite(slopes)]
    marks = np.percentile(finite, PERCENTILES) if finite.size else np.full(len(PERCENTILES), np.nan)
    return {
        "count": int(finite.size),
        "undefined": int(slopes.size - finite.size),
        **{f"p{percentile}": float(mark) for percentile, mark in zip(PERCENTILES, marks, strict=True)},
        "max": float(finite.max()) if finite.size else float("nan"),
        "bound": "lower bound",
    }
