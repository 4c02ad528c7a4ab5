"""Tracing: evaluate an objective over the points of a slice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import nn
from tqdm import tqdm

from stability.errors import UserError
from stability.landscape import directions as _directions
from stability.landscape import grid as _grid
from stability.landscape.directions import Directions
from stability.landscape.evaluate import Evaluator, model_fingerprint, norm_of
from stability.landscape.objective import Loss, make_objective
from stability.landscape.surface import Surface


def slice(
    model: nn.Module,
    loss: Loss,
    *,
    directions: Directions | str = "tensor",
    steps: int = 51,
    radius: float = 1.0,
    seed: int = 0,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    reduction: str = "mean",
    gradient_norm: bool = False,
    paper_compat: bool = False,
    method: str = "auto",
    chunk: int | None = None,
    progress: bool | None = None,
) -> Surface:
    r"""Trace a square slice of the loss around a model, :math:`L(\theta + x\,d_x + y\,d_y)`.

    Args:
        model: any module; its parameters, buffers, mode and gradients stay as they are. It is evaluated in evaluation
            mode.
        loss: `loss(model) -> scalar`, or a pair (loss_fn, batches) with `loss_fn(output, target) -> scalar`.
        directions: a scaling ("tensor" as in the paper, "filter", "layer", "none") to draw Gaussian directions, or
            `Directions`.
        steps: points per direction; odd numbers include the centre.
        radius: largest coordinate, in multiples of the directions.
        seed: of the directions.
        functions: further functions by name, evaluated in the same pass, for example `{"accuracy":
            landscape.accuracy}`.
        reduction: how batches are combined, "mean" by samples or "sum".
        gradient_norm: add a column with the norm of the loss's gradient.
        paper_compat: the paper's grid and directions: 200 points from -1 to 1, scaled per tensor, not orthogonal.
        method: "auto", "in place" or "vmap".
        chunk: points per pass over the data.
        progress: show a bar; by default on a terminal only.

    Returns:
        The surface.

    Raises:
        UserError: if an argument does not make sense, or evaluating the centre twice gives two results.
    """
    if paper_compat:
        steps, radius = _grid.PAPER_STEPS, 1.0
    points = _grid.square(steps, radius)
    if isinstance(directions, str):
        directions = _directions.gaussian(model, seed=seed, scaling=directions, orthogonal=not paper_compat)
    if directions.y is None:
        raise UserError("Expected two directions for a slice, but got one; use `landscape.line`.")
    evaluator = Evaluator(model, make_objective(loss, functions, reduction), directions, gradient_norm=gradient_norm)
    extra = {"kind": "slice", "steps": steps, "radius": radius}
    return _trace(model, evaluator, directions, points, extra, method=method, chunk=chunk, progress=progress)


def _trace(
    model: nn.Module,
    evaluator: Evaluator,
    directions: Directions,
    points: Float64[np.ndarray, "points two"],
    extra: Mapping[str, Any],
    *,
    method: str,
    chunk: int | None,
    progress: bool | None,
) -> Surface:
    center = evaluator.check_deterministic()
    plan = evaluator.plan(method=method, chunk=chunk, points=len(points))
    columns: dict[str, list[float]] = {name: [] for name in (*evaluator.names, "seconds")}
    with tqdm(total=len(points), unit="point", disable=None if progress is None else not progress) as bar:
        for start in range(0, len(points), plan.chunk):
            part = [(float(x), float(y)) for x, y in points[start : start + plan.chunk]]
            began = time.perf_counter()
            values = evaluator.values(part, plan.method)
            seconds = (time.perf_counter() - began) / len(part)
            for name in evaluator.names:
                columns[name] += values[name]
            columns["seconds"] += [seconds] * len(part)
            bar.update(len(part))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    metadata = {
        **extra,
        "directions": directions.kind,
        "scaling": directions.scaling,
        "seed": directions.seed,
        "direction_details": dict(directions.details),
        "direction_norms": list(directions.norms),
        "inner_product": directions.inner_product,
        "parameter_norm": norm_of(parameters),
        "model": model_fingerprint(model),
        "center": center,
        "method": plan.method,
        "chunk": plan.chunk,
        "threads": torch.get_num_threads(),
    }
    return assemble(points, columns, metadata)


def assemble(
    points: Float64[np.ndarray, "points two"], columns: Mapping[str, list[float]], metadata: Mapping[str, Any]
) -> Surface:
    """Make the table of a surface from values at points.

    Args:
        points: coordinates.
        columns: functions, and "seconds" last, one number per point.
        metadata: must hold "direction_norms", "inner_product" and "parameter_norm".

    Returns:
        The surface, with the number of points that are not finite added to its metadata.
    """
    norms = metadata["direction_norms"]
    first, second = norms[0], norms[1] if len(norms) > 1 else 0.0
    product = metadata["inner_product"]
    distance = _grid.distances(points, np.array([[first**2, product], [product, second**2]]))
    total = metadata["parameter_norm"]
    frame = pd.DataFrame(
        {
            "x": points[:, 0],
            "y": points[:, 1],
            "distance": distance,
            "relative_distance": distance / total if total else np.full(len(points), np.nan),
            **{name: np.asarray(values, dtype=float) for name, values in columns.items()},
        }
    )
    surface = Surface(frame, metadata)
    return Surface(frame, {**metadata, "non_finite": surface.non_finite})
