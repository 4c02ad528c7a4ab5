"""Tracing: evaluate an objective over the points of a slice, a line, or the segment between two models."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import nullcontext
from typing import Any, TypedDict, Unpack

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
from stability.landscape.hessian import hessian
from stability.landscape.objective import Loss, make_objective
from stability.landscape.parallel import Chunk, Job, Place, limited_threads, run
from stability.landscape.store import DIRECTIONS, SURFACE, Store
from stability.landscape.surface import Surface


class Options(TypedDict, total=False):
    """What `slice`, `line` and `between` have in common.

    Attributes:
        functions: further functions by name, evaluated in the same pass, for example `{"accuracy":
            landscape.accuracy}`.
        reduction: how batches are combined: "mean" (default) weighs them by samples, "sum" adds.
        gradient_norm: add a column with the Euclidean norm of the loss's gradient with respect to all parameters.
        method: "auto" (default: "vmap" where a forward pass is small), "in place" or "vmap".
        chunk: points per pass over the data, and between two writes to the disk; some seconds' worth by default.
        out: folder for surface.parquet, directions.safetensors and the log of finished chunks. A run that was stopped
            goes on where it was when it is started again with the same arguments.
        force: replace what is in `out`.
        workers: processes on this machine, each with one thread unless `threads` says otherwise.
        executor: any `concurrent.futures.Executor` to use instead.
        scheduler: address of a Dask scheduler to use instead.
        threads: of torch, per worker; by default 1 with workers and all otherwise.
        progress: show a bar; by default on a terminal only.
        name: of the model, for figures.
    """

    functions: Mapping[str, Callable[..., Any]] | None
    reduction: str
    gradient_norm: bool
    method: str
    chunk: int | None
    out: str | os.PathLike[str] | None
    force: bool
    workers: int
    executor: Executor | None
    scheduler: str | None
    threads: int | None
    progress: bool | None
    name: str | None


def slice(
    model: nn.Module,
    loss: Loss,
    *,
    directions: Directions | str = "tensor",
    steps: int = 51,
    radius: float = 1.0,
    seed: int = 0,
    paper_compat: bool = False,
    **options: Unpack[Options],
) -> Surface:
    r"""Trace a square slice of the loss around a model, :math:`L(\theta + x\,d_x + y\,d_y)`.

    Args:
        model: any module; its parameters, buffers, mode and gradients stay as they are. It is evaluated in evaluation
            mode.
        loss: `loss(model) -> scalar`, or a pair (loss_fn, batches) with `loss_fn(output, target) -> scalar`. A batch is
            (inputs, target) or a mapping of the model's keyword arguments with the target under "labels".
        directions: a scaling ("tensor" as in the paper, "filter", "layer", "unscaled") to draw Gaussian directions, or
            "hessian" for the directions of largest curvature, or `Directions` made or read elsewhere.
        steps: points per direction; odd numbers include the centre.
        radius: largest coordinate, in multiples of the directions.
        seed: of the directions, if they are drawn here.
        paper_compat: the paper's grid and directions: 200 points from -1 to 1, scaled per tensor, not orthogonal.
        **options: see `Options`.

    Returns:
        The surface.

    Raises:
        UserError: if an argument does not make sense, evaluating the centre twice gives two results, or `out` holds the
            surface of another model, data or directions.
    """
    if paper_compat:
        steps, radius = _grid.PAPER_STEPS, 1.0
    if directions == "hessian":
        directions = hessian(model, loss, seed=seed)
    if isinstance(directions, str):
        directions = _directions.gaussian(model, seed=seed, scaling=directions, orthogonal=not paper_compat)
    if directions.y is None:
        raise UserError("Expected two directions for a slice, but got one; use `landscape.line`.")
    extra = {"kind": "slice", "steps": steps, "radius": radius}
    return _trace(model, loss, directions, _grid.square(steps, radius), extra, options)


def line(
    model: nn.Module,
    loss: Loss,
    *,
    directions: Directions | str = "tensor",
    steps: int = 51,
    radius: float = 1.0,
    seed: int = 0,
    **options: Unpack[Options],
) -> Surface:
    r"""Trace the loss along one direction, :math:`L(\theta + x\,d_x)`.

    Args:
        model: any module; it stays as it is.
        loss: as in `slice`.
        directions: a scaling to draw a Gaussian direction, or `Directions`, whose x is used.
        steps: number of points; odd numbers include the centre.
        radius: largest coordinate.
        seed: of the direction, if it is drawn here.
        **options: see `Options`.

    Returns:
        The surface; y is 0 everywhere.
    """
    if isinstance(directions, str):
        directions = _directions.gaussian(model, seed=seed, scaling=directions, count=1)
    along = _grid.axis(steps, radius)
    points = np.stack([along, np.zeros_like(along)], axis=1)
    extra = {"kind": "line", "steps": steps, "radius": radius}
    return _trace(model, loss, directions.first(), points, extra, options)


def between(
    model_a: nn.Module,
    model_b: nn.Module,
    loss: Loss,
    *,
    steps: int = 51,
    beyond: float = 0.0,
    **options: Unpack[Options],
) -> Surface:
    r"""Trace the loss on the segment between two models, :math:`L(\theta_a + x\,(\theta_b - \theta_a))`.

    Args:
        model_a: the model at x = 0; its buffers are used throughout.
        model_b: the model at x = 1, with parameters of the same names and shapes.
        loss: as in `slice`.
        steps: number of points.
        beyond: how far to go on past each end, as a share of the segment.
        **options: see `Options`.

    Returns:
        The surface; y is 0 everywhere.

    Raises:
        UserError: if the two models differ in shape, or an argument does not make sense.
    """
    if steps < 2 or not beyond >= 0:
        raise UserError(f"Expected at least 2 `steps` and `beyond` not below 0, but got {steps} and {beyond}.")
    directions = _directions.towards(model_a, dict(model_b.named_parameters()))
    along = np.linspace(-beyond, 1 + beyond, steps)
    points = np.stack([along, np.zeros_like(along)], axis=1)
    return _trace(model_a, loss, directions, points, {"kind": "between", "steps": steps, "beyond": beyond}, options)


def _trace(
    model: nn.Module,
    loss: Loss,
    directions: Directions,
    points: Float64[np.ndarray, "points two"],
    extra: Mapping[str, Any],
    options: Options,
) -> Surface:
    objective = make_objective(loss, options.get("functions"), options.get("reduction", "mean"))
    place = Place(options.get("workers", 1), options.get("executor"), options.get("scheduler"))
    threads = options.get("threads") or (1 if place.elsewhere else torch.get_num_threads())
    out = options.get("out")
    with limited_threads(threads):
        evaluator = Evaluator(model, objective, directions, gradient_norm=options.get("gradient_norm", False))
        center = evaluator.check_deterministic()
        plan = evaluator.plan(method=options.get("method", "auto"), chunk=options.get("chunk"), points=len(points))
        identity = {
            "model": model_fingerprint(model),
            "data": objective.fingerprint(),
            "directions": directions.fingerprint(),
            "points": hashlib.sha256(points.tobytes()).hexdigest(),
            "functions": list(evaluator.names),
            "reduction": objective.reduction,
            "center": center,
        }
        with nullcontext() if out is None else Store(out, identity, plan, force=options.get("force", False)) as store:
            if store is not None:
                plan = store.plan
                directions.write(store.folder / DIRECTIONS)
            job = Job(evaluator, directions, plan.method, threads)
            chunks = _evaluate(job, points, plan.chunk, place, store, options.get("progress"))
            metadata = {
                **extra,
                **_described(model, directions),
                **{key: identity[key] for key in ("model", "data", "center")},
                "name": options.get("name") or "",
                "method": plan.method,
                "chunk": plan.chunk,
                "threads": threads,
            }
            surface = assemble(points, chunks, metadata)
            if store is not None:
                surface.write(store.folder / SURFACE)
    return surface


# Chunks that the store holds already are not evaluated again.
def _evaluate(
    job: Job,
    points: Float64[np.ndarray, "points two"],
    size: int,
    place: Place,
    store: Store | None,
    progress: bool | None,
) -> list[Chunk]:
    chunks: dict[int, Chunk] = dict(store.chunks) if store else {}
    starts = range(0, len(points), size)
    todo = {
        start: [(float(x), float(y)) for x, y in points[start : start + size]]
        for start in starts
        if start not in chunks
    }
    with tqdm(total=len(points), unit="point", disable=None if progress is None else not progress) as bar:
        bar.update(len(points) - sum(map(len, todo.values())))
        for start, chunk in run(todo, job, place):
            if store is not None:
                store.add(start, *chunk)
            chunks[start] = chunk
            bar.update(len(todo[start]))
    return [chunks[start] for start in starts]


def _described(model: nn.Module, directions: Directions) -> dict[str, Any]:
    return {
        "directions": directions.kind,
        "scaling": directions.scaling,
        "seed": directions.seed,
        "direction_details": dict(directions.details),
        "direction_norms": list(directions.norms),
        "inner_product": directions.inner_product,
        "parameter_norm": norm_of({name: parameter.detach() for name, parameter in model.named_parameters()}),
    }


def assemble(
    points: Float64[np.ndarray, "points two"], chunks: Iterable[Chunk], metadata: Mapping[str, Any]
) -> Surface:
    """Make the table of a surface from values at points.

    Args:
        points: coordinates.
        chunks: values by function and seconds per point, in the order of the points.
        metadata: must hold "direction_norms", "inner_product" and "parameter_norm".

    Returns:
        The surface, with the number of points that are not finite added to its metadata.
    """
    columns: dict[str, list[float]] = {}
    seconds: list[float] = []
    for values, duration in chunks:
        for name, numbers in values.items():
            columns.setdefault(name, []).extend(numbers)
            count = len(numbers)
        seconds += [duration] * count
    norms = [*metadata["direction_norms"], 0.0]
    product, total = metadata["inner_product"], metadata["parameter_norm"]
    distance = _grid.distances(points, np.array([[norms[0] ** 2, product], [product, norms[1] ** 2]]))
    frame = pd.DataFrame(
        {
            "x": points[:, 0],
            "y": points[:, 1],
            "distance": distance,
            "relative_distance": distance / total if total else np.full(len(points), np.nan),
            **{name: np.asarray(values, dtype=float) for name, values in columns.items()},
            "seconds": seconds,
        }
    )
    return Surface(frame, {**metadata, "non_finite": Surface(frame).non_finite})
