"""The CSV of the paper's released scripts: idx, xval, yval, loss, acc, time.

`idx` numbers the rows; xval and yval are coordinates in grid units. Their plotting script finds a point's cell by
truncating (value - smallest) / step to a whole number, which a rounding error just below turns into the neighbour's
cell: coordinates but the smallest are therefore written a millionth of a step too high, and moved back when they are
read. Their contour plot draws xval upwards and yval to the right; `transpose` swaps the two for them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from stability.errors import UserError
from stability.files import atomic_write
from stability.landscape.surface import Surface

COLUMNS = ("idx", "xval", "yval", "loss", "acc", "time")
_LIFT = 1e-6  # of a step
_DIGITS = 1e-4  # of a step: coordinates closer than this are one


def write_csv(surface: Surface, path: str | os.PathLike[str], *, transpose: bool = False) -> Path:
    """Write a surface for the paper's plotting scripts.

    Args:
        surface: a slice with a loss; without an accuracy, acc is NaN.
        path: the file.
        transpose: swap the coordinates, so that their contour plot comes out the right way round.

    Returns:
        The path.
    """
    frame = surface.frame
    first, second = ("y", "x") if transpose else ("x", "y")
    table = pd.DataFrame(
        {
            "idx": np.arange(len(frame)),
            "xval": _lifted(frame[first].to_numpy(float)),
            "yval": _lifted(frame[second].to_numpy(float)),
            "loss": frame["loss"],
            "acc": frame.get("accuracy", np.nan),
            "time": frame["seconds"],
        }
    )
    with atomic_write(path) as temporary:
        table.to_csv(temporary, index=False, na_rep="nan")
    return Path(path)


def read_csv(
    path: str | os.PathLike[str],
    *,
    transpose: bool = False,
    direction_norms: tuple[float, float] | None = None,
    parameter_norm: float | None = None,
) -> Surface:
    """Read a surface that the paper's scripts, or `write_csv`, wrote.

    Points are placed by xval and yval, never by idx.

    Args:
        path: the file.
        transpose: the file was written with `transpose`.
        direction_norms: norms of the two directions, taken to be orthogonal; distances are NaN where they are not
            known.
        parameter_norm: norm of all parameters; relative distances are NaN where it is not known.

    Returns:
        The surface.

    Raises:
        UserError: if the file is missing, is not such a CSV, or gives a point twice.
    """
    try:
        table = pd.read_csv(path, skipinitialspace=True)
    except (OSError, ValueError) as error:
        raise UserError(f"Expected a CSV of a surface at {path}, but it can't be read ({error}).") from error
    missing = [name for name in COLUMNS[1:] if name not in table.columns]
    if missing or table.empty:
        raise UserError(
            f"Expected rows with {', '.join(COLUMNS)} in {path}, but got {', '.join(missing) or 'no row'} missing."
        )
    try:
        numbers = {name: table[name].to_numpy(float) for name in COLUMNS[1:]}
    except ValueError as error:
        raise UserError(f"Expected numbers in {path}, but got something else ({error}).") from error
    x, y = _snapped(numbers["xval"]), _snapped(numbers["yval"])
    if transpose:
        x, y = y, x
    if pd.DataFrame({"x": x, "y": y}).duplicated().any():
        raise UserError(f"Expected each point once in {path}, but some coordinates are there twice; remove the copies.")
    distance = np.hypot(x * direction_norms[0], y * direction_norms[1]) if direction_norms else np.full(len(x), np.nan)
    frame = pd.DataFrame(
        {
            "x": x,
            "y": y,
            "distance": distance,
            "relative_distance": distance / parameter_norm if parameter_norm else np.full(len(x), np.nan),
            "loss": numbers["loss"],
            "accuracy": numbers["acc"],
            "seconds": numbers["time"],
        }
    )
    frame = frame.sort_values(["y", "x"], ignore_index=True)
    metadata: dict[str, Any] = {
        "kind": "slice",
        "source": os.fspath(path),
        "direction_norms": list(direction_norms or ()),
    }
    return Surface(frame, {**metadata, "parameter_norm": parameter_norm, "non_finite": Surface(frame).non_finite})


# The smallest stays, so that a reader that measures from the file's smallest value truncates right as well.
def _lifted(values: Float64[np.ndarray, " row"]) -> Float64[np.ndarray, " row"]:
    distinct = np.unique(values)
    return (
        np.where(values > distinct[0], values + _LIFT * np.diff(distinct).min(), values)
        if len(distinct) > 1
        else values
    )


# One coordinate of a grid appears in many rows, and rounding may differ between them: near ones become one. Equally
# spaced ones are put on the grid that the file's first and last coordinate span, so that its centre is exactly 0.
def _snapped(values: Float64[np.ndarray, " row"]) -> Float64[np.ndarray, " row"]:
    ordered = np.unique(values)
    gaps = np.diff(ordered)
    if not np.isfinite(values).all() or not len(gaps):
        return values
    steps = gaps[gaps > _DIGITS * gaps.max()]
    group = np.concatenate([[0], np.cumsum(gaps > _DIGITS * gaps.max())])
    centers = np.array([ordered[group == number].mean() for number in range(group[-1] + 1)])
    if len(steps) > 1 and 0.5 * _LIFT < steps[0] / steps[1:].mean() - 1 < 2 * _LIFT:
        centers[1:] -= _LIFT * steps[1:].mean()  # `write_csv` wrote this
    if np.allclose(steps, steps.mean(), rtol=1e-3):
        even = np.linspace(centers[0], centers[-1], len(centers))
        middle = even[len(even) // 2] if len(even) % 2 else (even[len(even) // 2 - 1] + even[len(even) // 2]) / 2
        # A grid about 0 is exactly antisymmetric.
        centers = even - middle if abs(middle) < 1e-3 * steps.mean() else even
        centers = (centers - centers[::-1]) / 2 if abs(middle) < 1e-3 * steps.mean() else centers
    return np.asarray(centers[group[np.searchsorted(ordered, values)]])
