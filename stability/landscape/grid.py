"""Points of a slice: coordinates along the directions, and how far they are from the centre."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64

from stability.errors import UserError

PAPER_STEPS = (
    200  # the paper's grid: linspace(-1, 1, 200) along both directions, so that the trained point lies between points
)


def axis(steps: int, radius: float) -> Float64[np.ndarray, " steps"]:
    """Equally spaced coordinates from -radius to radius.

    Args:
        steps: number of points; odd numbers have the centre, exactly 0, among them.
        radius: largest coordinate.

    Returns:
        Ascending coordinates, exactly antisymmetric.

    Raises:
        UserError: if `steps` is below 2 or `radius` is not positive and finite.
    """
    if steps < 2:
        raise UserError(f"Expected `steps` to be at least 2 points per direction, but got {steps}.")
    if not (radius > 0 and math.isfinite(radius)):
        raise UserError(f"Expected `radius` to be a positive number, but got {radius}.")
    half = np.linspace(0.0, radius, steps // 2 + 1)[1:] if steps % 2 else np.linspace(0.0, radius, steps)[1::2]
    return np.concatenate([-half[::-1], np.zeros(steps % 2), half])


def square(steps: int, radius: float) -> Float64[np.ndarray, "points two"]:
    """Points of a square grid, row by row: y changes slowest.

    Args:
        steps: points per direction.
        radius: largest coordinate.

    Returns:
        One (x, y) per row.
    """
    along = axis(steps, radius)
    x, y = np.meshgrid(along, along)
    return np.stack([x.ravel(), y.ravel()], axis=1)


def distances(
    points: Float64[np.ndarray, "points two"], gram: Float64[np.ndarray, "two two"]
) -> Float64[np.ndarray, " points"]:
    r"""Parameter distance of each point from the centre, :math:`\|x d_x + y d_y\|_2`.

    Args:
        points: coordinates.
        gram: inner products of the directions, so that skew directions are measured right.

    Returns:
        Distances, not negative.
    """
    squares = ((points @ gram) * points).sum(1)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))
