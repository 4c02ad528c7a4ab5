"""The parts of the report: each turns the tables of one kind into figures and tables with words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from stability.landscape import Surface

METRICS = ("dispersion", "separation", "sink_ratio")


@dataclass
class Table:
    """A table of the page, its cells already words.

    Args:
        caption: what it shows, with units.
        columns: headings.
        rows: cells.
        folded: shown only on a click.
    """

    caption: str
    columns: list[str]
    rows: list[list[str]]
    folded: bool = False


@dataclass
class Section:
    """A part of the page.

    Args:
        title: its heading.
        words: a paragraph before the figures.
        figures: name, caption and figure of each.
        tables: after the figures.
    """

    title: str
    words: str = ""
    figures: list[tuple[str, str, Figure]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Gathered:
    """The tables found in the folders, by the folder's name.

    Args:
        tables: for each kind of table, the frames by folder name.
        surfaces: the loss surfaces by folder name.
    """

    tables: dict[str, dict[str, pd.DataFrame]]
    surfaces: dict[str, Surface]


def cell(value: object) -> str:
    """Write one value for a reader.

    Args:
        value: a number, a word, or a missing value.

    Returns:
        At most four significant digits; a dash for what is missing.
    """
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def table(frame: pd.DataFrame, caption: str, columns: Mapping[str, str], *, folded: bool = False) -> Table:
    """Make a table of the page from some columns of a frame.

    Args:
        frame: the numbers.
        caption: what it shows, with units.
        columns: heading of each column to show, by its name.
        folded: shown only on a click.

    Returns:
        The table.
    """
    rows = [[cell(value) for value in row] for row in frame[list(columns)].itertuples(index=False, name=None)]
    return Table(caption, list(columns.values()), rows, folded)


def learning(found: Gathered) -> Section:
    """Show how training went.

    Args:
        found: the gathered tables.

    Returns:
        Learning curves, and one row a run.
    """
    from stability import figures

    histories = found.tables["history"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figures.learning_curves(histories, ax=figure.subplots())
    rows = []
    for name, history in histories.items():
        reached = history.loc[history.train_accuracy >= 0.95, "epoch"]
        last = history.iloc[-1]
        epoch = str(int(reached.iloc[0])) if len(reached) else "never"
        rows.append([name, epoch, *(cell(float(last[key])) for key in ("epoch", "train_accuracy", "heldout_accuracy"))])
    columns = ["run", "first epoch with 95 % training accuracy", "epochs", "training accuracy", "held-out accuracy"]
    shown = Table("One row a run; epochs count from 1.", columns, rows)
    return Section("Learning", figures=[("learning-curves", "Accuracy by epoch.", figure)], tables=[shown])


def measurements(found: Gathered) -> Section:
    """Show dispersion, separation and sink ratio of every measured model.

    Args:
        found: the gathered tables.

    Returns:
        One figure a model, the pooled numbers, and the numbers per head behind a click.
    """
    from probes import plots

    section = Section(
        "Dispersion, separation, sink ratio",
        "Measured on each query (sink ratio: on each key) of every head; padding is left out.",
    )
    headings = {name: name for name in ("count", "undefined", "mean", "p25", "p50", "p75", "p90", "p95", "max")}
    for name, frame in found.tables["measurements"].items():
        heads = frame[(frame.metric == "dispersion") & (frame.scope == "head")]
        if not heads.empty:
            figure = Figure(figsize=(9, 3.8), layout="constrained")
            plots.dispersion(heads, ax=figure.subplots()).set_title(name)
            section.figures.append((f"dispersion-{name}", f"{name}: dispersion by layer and head.", figure))
        chosen = frame[frame.metric.isin(METRICS)]
        pooled = chosen[chosen.scope == "model"]
        words = f"{name}: all layers and heads together; dispersion and separation in nats."
        section.tables.append(table(pooled, words, {"selection": "selection", "metric": "metric", **headings}))
        each = chosen[chosen.scope == "head"]
        where = {"layer": "layer", "head": "head", "selection": "selection", "metric": "metric"}
        section.tables.append(table(each, f"{name}: every head.", {**where, **headings}, folded=True))
    return section


def verdicts(found: Gathered) -> Section:
    """Show which inequalities of Appendix F.4 hold.

    Args:
        found: the gathered tables.

    Returns:
        One table a pair.
    """
    section = Section(
        "When does the theory promise an advantage?",
        "Appendix F.4: heavy-hitter attention has the smaller constant where the left-hand side is at most 1 "
        "(parameter stability, equation 276; input stability, equation 277).",
    )
    columns = {
        "percentile": "percentile",
        "condition": "condition",
        "left_hand_side": "left-hand side",
        "right_hand_side": "right-hand side",
        "margin": "margin",
        "verdict": "verdict",
    }
    for name, frame in found.tables["verdicts"].items():
        whole = frame[frame.scope == "model"]
        section.tables.append(table(whole, f"{name}: all layers and heads together.", columns))
        layers = frame[frame.scope == "layer"]
        if len(layers):
            section.tables.append(table(layers, f"{name}: by layer.", {"layer": "layer", **columns}, folded=True))
    return section


def landscapes(found: Gathered) -> Section:
    """Show the loss around each trained model.

    Args:
        found: the gathered tables.

    Returns:
        One contour figure a surface.
    """
    from stability.landscape import figures

    section = Section("Loss slices", "The trained model is at the centre of its plane; both directions are random.")
    for name, surface in found.surfaces.items():
        figure = Figure(figsize=(5.6, 4.6), layout="constrained")
        named = dataclasses.replace(surface, metadata={**surface.metadata, "name": name})
        figures.contour(named, ax=figure.subplots())
        section.figures.append((f"loss-slice-{name}", f"{name}: loss on a plane around the trained model.", figure))
    return section


def lipschitz(found: Gathered) -> Section:
    """Show the Lipschitz estimates of the training loss by distance from the trained model.

    Args:
        found: the gathered tables.

    Returns:
        All models in one figure, and one table a model.
    """
    from stability.landscape import figures

    frames = found.tables["lipschitz"]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    figures.lipschitz_curves(frames, ax=figure.subplots())
    caption = "Steepness of the training loss between neighbours of the slice within a distance of each trained model."
    section = Section("Lipschitz estimates", figures=[("lipschitz", caption, figure)])
    columns = {
        "function": "function", "radius": "distance at most", "count": "pairs", "undefined": "not finite",
        "p50": "p50", "p75": "p75", "p95": "p95", "p99": "p99", "max": "max",
    }  # fmt: skip
    for name, frame in frames.items():
        per_distance = frame[frame.unit == "parameter"]
        words = f"{name}: change per unit of parameter distance; lower bounds from samples."
        section.tables.append(table(per_distance, words, columns, folded=True))
    return section


Maker = Callable[[Gathered], Section]
MAKERS: Sequence[tuple[str, Maker]] = (
    ("history", learning),
    ("measurements", measurements),
    ("verdicts", verdicts),
    ("surface", landscapes),
    ("lipschitz", lipschitz),
)
