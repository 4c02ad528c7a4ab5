"""`stability landscape`: trace a slice around a checkpoint, estimate Lipschitz constants, draw both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.errors import UserError
from stability.files import atomic_write, refuse_existing, write_table

if TYPE_CHECKING:
    import pandas as pd

    from stability.checkpoints import Checkpoint
    from stability.landscape import Directions, Surface

DRAWN = ("tensor", "filter", "layer", "unscaled")
KINDS = (*DRAWN, "hessian", "pca", "checkpoints")


@dataclass(frozen=True)
class Traced:
    """What one call made.

    Attributes:
        surface: the traced points.
        estimates: Lipschitz estimates by distance from the centre.
        paths: every file written, in the order of writing.
    """

    surface: Surface
    estimates: pd.DataFrame
    paths: tuple[Path, ...]


def run_landscape(
    checkpoint: str | os.PathLike[str],
    *,
    steps: int = 51,
    radius: float = 1.0,
    seed: int = 0,
    directions: str = "tensor",
    reuse: str | os.PathLike[str] | None = None,
    to: Sequence[str | os.PathLike[str]] = (),
    orthogonal: bool = True,
    keep_biases: bool = True,
    keep_norms: bool = True,
    line: bool = False,
    paper_compat: bool = False,
    gradient_norm: bool = False,
    limit: int | None = None,
    batch_size: int = 128,
    held_out: bool = False,
    workers: int = 1,
    scheduler: str | None = None,
    method: str = "auto",
    chunk: int | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    csv: bool = False,
    figures: bool = True,
    progress: bool | None = None,
) -> Traced:
    """Trace the loss around a checkpoint and write surface, directions, Lipschitz estimates and figures.

    A run that was stopped goes on where it was if it is started again with the same arguments.

    Args:
        checkpoint: anything with data that `stability.open` opens.
        steps: points per direction; odd numbers include the centre.
        radius: largest coordinate, in multiples of the directions.
        seed: of the directions.
        directions: how Gaussian directions are scaled ("tensor" as in the paper, "filter", "layer", "unscaled"), or
            "hessian" (largest curvature), "pca" (of the checkpoints in `to`) or "checkpoints" (the one or two in `to`).
        reuse: a directions.safetensors of an earlier run, used instead.
        to: further checkpoints, for "pca" and "checkpoints".
        orthogonal: make the two Gaussian directions orthogonal after scaling.
        keep_biases: move biases too.
        keep_norms: move the parameters of normalisation layers too.
        line: trace the first direction only.
        paper_compat: the paper's grid and directions: 200 points from -1 to 1, per tensor, not orthogonal.
        gradient_norm: add the norm of the loss's gradient at each point.
        limit: use the first sequences only.
        batch_size: sequences in a batch.
        held_out: the held-out sequences instead of the training ones.
        workers: processes on this machine.
        scheduler: address of a Dask scheduler to use instead.
        method: "auto", "in place" or "vmap".
        chunk: points between two writes to the disk.
        out: folder to write to; the checkpoint's own folder where omitted.
        force: replace what is there.
        csv: also write the surface as the paper's released scripts do.
        figures: draw figures, as PNG and PDF.
        progress: show a bar; by default on a terminal only.

    Returns:
        The surface, the estimates and the paths.

    Raises:
        UserError: if the checkpoint has no labelled data, an argument does not make sense, or files are in the way.
    """
    import stability
    from stability import landscape, lipschitz

    folder = _folder(checkpoint, out)
    _refuse_finished(folder, force=force)
    opened = stability.open(checkpoint)
    if opened.loss is None:
        raise UserError(
            f"Expected a checkpoint with labelled data, but {checkpoint} has no labels to compute a loss with."
        )
    batches = list(opened.batches(limit, batch_size, held_out=held_out, labels=True))
    if paper_compat:
        orthogonal, directions = False, "tensor"
    chosen = _directions(
        opened, directions, reuse, to, seed, (opened.loss, batches), orthogonal, keep_biases, keep_norms
    )
    options: dict[str, Any] = {
        "functions": {"accuracy": landscape.accuracy},
        "gradient_norm": gradient_norm,
        "workers": workers,
        "scheduler": scheduler,
        "method": method,
        "chunk": chunk,
        "out": folder,
        "force": force,
        "name": _name(checkpoint),
        "progress": progress,
    }
    if line or chosen.y is None:
        surface = landscape.line(
            opened.model, (opened.loss, batches), directions=chosen, steps=steps, radius=radius, **options
        )
    else:
        surface = landscape.slice(
            opened.model,
            (opened.loss, batches),
            directions=chosen,
            steps=steps,
            radius=radius,
            paper_compat=paper_compat,
            **options,
        )
    estimates = lipschitz.estimate(surface)
    paths = [folder / "surface.parquet", folder / "directions.safetensors"]
    paths.append(write_table(estimates, folder / "lipschitz.parquet", checkpoint=str(checkpoint), seed=seed))
    if csv:
        paths.append(landscape.write_csv(surface, folder / "surface.csv"))
    if figures:
        paths += _figures(surface, estimates, folder / "figures")
    return Traced(surface, estimates, tuple(paths))


def _folder(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str] | None) -> Path:
    if out is not None:
        return Path(out)
    place = Path(checkpoint)
    return place if place.is_dir() else place.parent


def _name(checkpoint: str | os.PathLike[str]) -> str:
    return Path(checkpoint).resolve().name


# lipschitz.parquet is written after the surface is complete: a run that stopped before goes on, a finished one stays.
def _refuse_finished(folder: Path, *, force: bool) -> None:
    refuse_existing(folder / "lipschitz.parquet", force=force)
    if force:
        with contextlib.suppress(FileNotFoundError):
            (folder / "lipschitz.parquet").unlink()


def _directions(
    opened: Checkpoint,
    kind: str,
    reuse: str | os.PathLike[str] | None,
    to: Sequence[str | os.PathLike[str]],
    seed: int,
    loss: Any,
    orthogonal: bool,
    keep_biases: bool,
    keep_norms: bool,
) -> Directions:
    import stability
    from stability import landscape

    if reuse is not None:
        return landscape.Directions.read(reuse)
    if kind not in KINDS:
        raise UserError(f"Expected directions among {', '.join(KINDS)}, but got {kind!r}.")
    keep = {"keep_biases": keep_biases, "keep_norms": keep_norms}
    if kind in DRAWN:
        return landscape.gaussian(opened.model, seed=seed, scaling=kind, orthogonal=orthogonal, **keep)
    if kind == "hessian":
        return landscape.hessian(opened.model, loss, seed=seed, **keep)
    states = [stability.open(path).model.state_dict() for path in to]
    if kind == "pca":
        return landscape.principal(opened.model, states)
    if len(states) not in (1, 2):
        raise UserError(
            f"Expected one or two further checkpoints for directions to checkpoints, but got {len(states)}."
        )
    return landscape.towards(opened.model, *states)


def _figures(surface: Surface, estimates: pd.DataFrame, folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    from stability.landscape import figures

    name = surface.metadata["name"]
    makers: dict[str, Any] = {"lipschitz": lambda ax: figures.lipschitz_curves({name: estimates}, ax=ax)}
    if surface.metadata["kind"] == "line":
        makers["line"] = lambda ax: figures.profile({name: surface}, ax=ax)
    else:
        makers["contour"] = lambda ax: figures.contour(surface, ax=ax)
        makers["heat-map"] = lambda ax: figures.heat_map(surface, ax=ax)
        makers["surface-3d"] = lambda ax: figures.surface_3d(surface, ax=ax)
    written = []
    for stem, draw in makers.items():
        figure = Figure(figsize=(6, 4.8), layout="constrained")
        draw(figure.add_subplot(projection="3d" if stem == "surface-3d" else None))
        for suffix in ("png", "pdf"):
            path = folder / f"{stem}.{suffix}"
            with atomic_write(path) as temporary:
                figure.savefig(temporary, format=suffix, dpi=120)
            written.append(path)
    return written
