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
            pooled.setdefault(key[1:], []).append(np.concatenate(gathered[key]))
        for (place, selection, metric), heads in gathered.items():
            base = {"model": self.model, "module": place.module, "layer": place.layer, "selection": selection}
            for head, numbers in enumerate(summaries(heads)):
                rows.append(base | {"head": head, "scope": "head", "metric": metric} | numbers)
            rows.append(base | {"scope": "layer", "metric": metric} | summaries([np.concatenate(heads)])[0])
        for (selection, metric), parts in pooled.items():
            base = {"model": self.model, "module": "", "layer": None, "selection": selection}
            rows.append(base | {"scope": "model", "metric": metric} | summaries([np.concatenate(parts)])[0])
        identity = ("scope", "module", "head", "selection")
        kept = {tuple(row.get(name) for name in identity): row.get("mean") for row in rows if row["metric"] == "kept"}
        for row in rows:
            row["kind"] = self.kinds[str(row["selection"])]
            row["keys"] = kept[tuple(row.get(name) for name in identity)]
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


def summaries(groups: Sequence[Values]) -> list[dict[str, object]]:
    """Count, moments and percentiles of each of several groups of values.

    Args:
        groups: one dimension each; NaN where undefined.

    Returns:
        The columns from `count` to `error`, for each group.
    """
    if len({len(group) for group in groups}) != 1:
        return [summaries([group])[0] for group in groups]
    ordered = np.sort(np.stack(groups).astype(np.float64, copy=False), axis=1)  # NaN last
    counts = ordered.shape[1] - np.isnan(ordered).sum(1)
    result: list[dict[str, object]] = []
    same = bool((counts == counts[0]).all()) and counts[0] > 0
    with np.errstate(invalid="ignore"):
        together = _percentiles(ordered[:, : counts[0]]) if same else None
        for number, (values, count) in enumerate(zip(ordered, counts, strict=True)):
            known = values[:count]
            numbers = {"count": int(count), "undefined": len(values) - int(count), "error": "exact"}
            if count:
                numbers |= {"mean": known.mean(), "std": known.std(), "min": known[0], "max": known[-1]}
                quantiles = _percentiles(known[None])[0] if together is None else together[number]
                numbers |= {f"p{p}": quantile for p, quantile in zip(PERCENTILES, quantiles, strict=True)}
            result.append(numbers)
    return result


def _percentiles(ordered: Values) -> Values:
    # numpy's linear interpolation, on rows that are sorted already.
    where = np.array(PERCENTILES) / 100 * (ordered.shape[1] - 1)
    below = np.floor(where).astype(int)
    above = np.minimum(below + 1, ordered.shape[1] - 1)
    share = where - below
    low, high = ordered[:, below], ordered[:, above]
    step = high - low
    between = np.where(share >= 0.5, high - step * (1 - share), low + step * share)
    # Between two equal infinities nothing has to be interpolated.
    return np.where(low == high, low, between)
