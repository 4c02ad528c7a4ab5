r"""Slopes in random directions: far more directions than the two of a slice.

At each distance d from the centre, a random unit direction u leads to :math:`a = \theta + d\,u`, and a second one, v,
to :math:`b = a + s\,v`; the slope is :math:`|f(b) - f(a)| / s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from tqdm import tqdm

from stability.errors import UserError
from stability.landscape.directions import Direction, Directions, gaussian
from stability.landscape.evaluate import Evaluator
from stability.landscape.objective import Loss, make_objective
from stability.lipschitz.neighbours import summary

COLUMNS = (
    "function",
    "unit",
    "distance",
    "step",
    "count",
    "undefined",
    "p50",
    "p75",
    "p95",
    "p99",
    "max",
    "bound",
    "seed",
)


def sample(
    model: nn.Module,
    loss: Loss,
    *,
    distances: Sequence[float],
    directions: int = 64,
    step: float | None = None,
    scaling: str = "unscaled",
    seed: int = 0,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    r"""Estimate Lipschitz constants from pairs at chosen distances in random directions.

    Args:
        model: any module; it stays as it is.
        loss: as in `landscape.slice`.
        distances: of the pairs' first points from the model, :math:`\|\Delta\Theta\|_2`; 0 is the model itself.
        directions: pairs at each distance, each in directions of its own.
        step: parameter distance within a pair; a hundredth of the parameters' norm where omitted.
        scaling: of the Gaussian directions before they get norm 1: "unscaled" is uniform on the sphere, "tensor",
            "filter" and "layer" spread them as the parameters themselves are spread.
        seed: of the directions.
        functions: further functions by name.
        progress: show a bar; by default on a terminal only.

    Returns:
        One row per function and distance: percentiles and maximum of the slopes per unit of parameter distance, their
        count (the sample size), how many are undefined, and that they bound the true constant from below.

    Raises:
        UserError: if a distance is negative, there are none, or `directions` or `step` is not positive.
    """
    if not len(distances) or min(distances) < 0:
        raise UserError(f"Expected `distances` of at least 0, but got {list(distances)}.")
    if directions < 1:
        raise UserError(f"Expected `directions` to be at least 1, but got {directions}.")
    if step is None:
        step = 0.01 * float(torch.stack([p.detach().double().norm() for p in model.parameters()]).norm()) or 0.01
    if not step > 0:
        raise UserError(f"Expected `step` to be a positive parameter distance, but got {step}.")
    objective = make_objective(loss, functions)
    slopes: dict[tuple[str, float], list[float]] = {(name, d): [] for name in objective.names for d in distances}
    seeds = np.random.SeedSequence(seed).generate_state(directions, np.uint64) >> np.uint64(1)
    for number in tqdm(seeds, unit="direction", disable=None if progress is None else not progress):
        drawn = gaussian(model, seed=int(number), scaling=scaling, orthogonal=False)
        pair = Directions(_unit(drawn.x), None if drawn.y is None else _unit(drawn.y))
        evaluator = Evaluator(model, objective, pair)
        points = [(float(d), along) for d in distances for along in (0.0, step)]
        for name, values in evaluator.values(points).items():
            for distance, first, second in zip(distances, values[::2], values[1::2], strict=True):
                slopes[name, distance].append(abs(second - first) / step)
    rows = [
        {
            "function": name,
            "unit": "parameter",
            "distance": distance,
            "step": step,
            "seed": seed,
            **summary(np.array(found)),
        }
        for (name, distance), found in slopes.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _unit(direction: Direction) -> dict[str, torch.Tensor]:
    norm = float(torch.stack([tensor.double().norm() for tensor in direction.values()]).norm())
    return {name: tensor / (norm or 1.0) for name, tensor in direction.items()}
