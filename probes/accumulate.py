"""Gather values over batches and make the measurement table of them.

Values are gathered by module, selection and metric, one array a head; the table's layer rows pool the heads of a
module, its model rows pool everything. Summaries are taken of the sorted values, so that they do not depend on the
order of the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
COLUMNS = (
    "model", "module", "layer", "head", "scope", "selection", "kind", "keys", "metric", "count", "undefined",
    "mean", "std", "min", *(f"p{p}" for p in PERCENTILES), "max", "error",
)  # fmt: skip

Values = NDArray[np.floating]


@dataclass(frozen=True)
class Place:
    """Which attention a value belongs to.

    Args:
        module: the call's name.
        layer: its layer index, if any.
    """

    module: str
    layer: int | None


@dataclass
class Store:
    """All values gathered so far.

    Args:
        model: the model's name in the table.
        kinds: the kind of each selection, by its name.
    """

    model: str
    kinds: dict[str, str]
    chunks: dict[tuple[Place, str, str], list[list[Values]]] = field(default_factory=dict)

    def add(self, place: Place, selection: str, metric: str, heads: Sequence[Values]) -> None:
        """Add values.

        Args:
            place: which attention.
            selection: name of the selection.
            metric: name of the metric.
            heads: one array of values a head; NaN where undefined.
        """
        self.chunks.setdefault((place, selection, metric), []).append(list(heads))

    def table(self) -> pd.DataFrame:
        """Summarise.

        Returns:
            The measurement table.
        """
        rows: list[dict[str, object]] = []
        pooled: dict[tuple[str, str], list[Values]] = {}
        gathered: dict[tuple[Place, str, str], list[Values]] = {}
        for key, chunks in self.chunks.items():
            gathered[key] = [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
            pooled.setdefault(key[1:], []).extend(gathered[key])
        keys = {
            (place, selection): [_mean(head) for head in heads] + [_mean(np.concatenate(heads))]
            for (place, selection, metric), heads in gathered.items()
            if metric == "kept"
        }
        for (place, selection, metric), heads in gathered.items():
            base = {"model": self.model, "module": place.module, "layer": place.layer, "selection": selection}
            means = keys[place, selection]
            for head, (values, mean) in enumerate(zip(heads, means, strict=False)):
                rows.append(base | {"head": head, "scope": "head", "keys": mean, "metric": metric} | summary(values))
            rows.append(base | {"scope": "layer", "keys": means[-1], "metric": metric} | summary(np.concatenate(heads)))
        for (selection, metric), parts in pooled.items():
            mean = _mean(np.concatenate(pooled[selection, "kept"]))
            base = {"model": self.model, "module": "", "layer": None, "selection": selection}
            rows.append(base | {"scope": "model", "keys": mean, "metric": metric} | summary(np.concatenate(parts)))
        for row in rows:
            row["kind"] = self.kinds[str(row["selection"])]
        return as_table(rows)


def as_table(rows: Iterable[dict[str, object]]) -> pd.DataFrame:
    """Rows to a measurement table with its columns in order and of their types.

    Args:
        rows: one dictionary a row.

    Returns:
        The table.
    """
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    integers = {"layer": "Int64", "head": "Int64", "count": "int64", "undefined": "int64"}
    numbers = ("keys", "mean", "std", "min", *(f"p{p}" for p in PERCENTILES), "max")
    return frame.astype(integers | dict.fromkeys(numbers, "float64"))


def summary(values: Values) -> dict[str, object]:
    """Count, moments and percentiles of some values.

    Args:
        values: one dimension; NaN where undefined.

    Returns:
        The columns from `count` to `error`.
    """
    ordered = np.sort(values.astype(np.float64, copy=False))  # NaN last
    count = len(ordered) - int(np.isnan(ordered).sum())
    ordered = ordered[:count]
    numbers: dict[str, object] = {"count": count, "undefined": len(values) - count, "error": "exact"}
    if count == 0:
        return numbers
    with np.errstate(invalid="ignore"):
        numbers |= {"mean": ordered.mean(), "std": ordered.std(), "min": ordered[0], "max": ordered[-1]}
        quantiles = np.percentile(ordered, PERCENTILES)
    return numbers | {f"p{p}": value for p, value in zip(PERCENTILES, quantiles, strict=True)}


def _mean(values: Values) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
