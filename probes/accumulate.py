"""Gather values over batches and make the measurement table of them.

Values are gathered by module, selection and metric, one array a head; the table's layer rows pool the heads of a
module, its model rows pool everything. Summaries are taken of the sorted values, so that they do not depend on the
order of the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from probes.errors import ProbeError
from probes.sketch import Sketch, merged

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
COLUMNS = (
    "model", "module", "layer", "head", "scope", "selection", "kind", "keys", "metric", "count", "undefined",
    "mean", "std", "min", *(f"p{p}" for p in PERCENTILES), "max", "error",
)  # fmt: skip

STATE = ("model", "module", "layer", "head", "selection", "kind", "metric", "values", "moments", "sketch")

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


Key = tuple[Place, str, str]
MEMORY = 2**30
"""Bytes of values that are kept before sketches take their place."""


@dataclass
class Store:
    """All values gathered so far: themselves while they fit in memory, sketches of them from then on.

    Args:
        model: the model's name in the table.
        kinds: the kind of each selection, by its name.
        memory: bytes of values to keep.
    """

    model: str
    kinds: dict[str, str]
    memory: int = MEMORY
    chunks: dict[Key, list[list[Values]]] = field(default_factory=dict)
    sketches: dict[Key, list[Sketch]] = field(default_factory=dict)
    _held: int = 0

    def add(self, place: Place, selection: str, metric: str, heads: Sequence[Values]) -> None:
        """Add values.

        Args:
            place: which attention.
            selection: name of the selection.
            metric: name of the metric.
            heads: one array of values a head; NaN where undefined.
        """
        key = (place, selection, metric)
        if self.sketches:
            self._sketch(key, heads)
            return
        self.chunks.setdefault(key, []).append(list(heads))
        self._held += sum(values.nbytes for values in heads)
        if self._held > self.memory:
            self.forget()

    def forget(self) -> None:
        """Replace all values by sketches of them."""
        for key, chunks in self.chunks.items():
            for heads in chunks:
                self._sketch(key, heads)
        self.chunks.clear()

    def _sketch(self, key: Key, heads: Sequence[Values]) -> None:
        sketches = self.sketches.setdefault(key, [Sketch() for _ in heads])
        for sketch, values in zip(sketches, heads, strict=True):
            sketch.add(values)

    def merge(self, other: Store) -> None:
        """Take in what another store of the same model and selections has gathered.

        Args:
            other: it stays as it is.

        Raises:
            ProbeError: if it is of another model or of other selections.
        """
        if (self.model, self.kinds) != (other.model, other.kinds):
            raise ProbeError(
                f"Expected parts of one measurement, of {self.model} with {', '.join(self.kinds)}, "
                f"but got one of {other.model} with {', '.join(other.kinds)}."
            )
        if other.sketches:
            self.forget()
        for key, chunks in other.chunks.items():
            for heads in chunks:
                self.add(*key, heads)
        for key, sketches in other.sketches.items():
            mine = self.sketches.setdefault(key, [Sketch() for _ in sketches])
            for own, more in zip(mine, sketches, strict=True):
                own.merge(more)

    def table(self) -> pd.DataFrame:
        """Summarise.

        Returns:
            The measurement table.
        """
        rows: list[dict[str, object]] = []
        pooled: dict[tuple[str, str], list[Any]] = {}
        for key, heads in self._gathered():
            place, selection, metric = key
            base = {"model": self.model, "module": place.module, "layer": place.layer, "selection": selection}
            for head, numbers in enumerate(_summaries(heads)):
                rows.append(base | {"head": head, "scope": "head", "metric": metric} | numbers)
            layer = _pool(heads)
            rows.append(base | {"scope": "layer", "metric": metric} | _summaries([layer])[0])
            pooled.setdefault((selection, metric), []).append(layer)
        for (selection, metric), parts in pooled.items():
            base = {"model": self.model, "module": "", "layer": None, "selection": selection}
            rows.append(base | {"scope": "model", "metric": metric} | _summaries([_pool(parts)])[0])
        identity = ("scope", "module", "head", "selection")
        kept = {tuple(row.get(name) for name in identity): row.get("mean") for row in rows if row["metric"] == "kept"}
        for row in rows:
            row["kind"] = self.kinds[str(row["selection"])]
            row["keys"] = kept[tuple(row.get(name) for name in identity)]
        return as_table(rows)

    def _gathered(self) -> Iterator[tuple[Key, list[Any]]]:
        for key, chunks in self.chunks.items():
            yield key, [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
        yield from self.sketches.items()

    def state(self) -> pd.DataFrame:
        """Everything gathered, as a table that `restore` reads: what a part of a measurement leaves for the merge.

        Returns:
            One row a head, selection and metric, with the values or their sketch.
        """
        rows: list[dict[str, object]] = []
        for (place, selection, metric), heads in self._gathered():
            for head, held in enumerate(heads):
                kept = held.state() if isinstance(held, Sketch) else {"values": held.astype(np.float64)}
                row = {"model": self.model, "module": place.module, "layer": place.layer, "head": head}
                rows.append(row | {"selection": selection, "kind": self.kinds[selection], "metric": metric} | kept)
        return pd.DataFrame(rows, columns=list(STATE)).astype({"layer": "Int64"})

    @classmethod
    def restore(cls, state: pd.DataFrame, memory: int = MEMORY) -> Store:
        """The inverse of `state`.

        Args:
            state: the table.
            memory: bytes of values to keep.

        Returns:
            The store.

        Raises:
            ProbeError: if the table is not of that form.
        """
        if missing := [name for name in STATE if name not in state] or ([] if len(state) else ["any row"]):
            raise ProbeError(f"Expected a part of a measurement, but the table lacks {', '.join(missing)}.")
        kinds = dict(zip(state["selection"], state["kind"], strict=True))
        store = cls(str(state["model"].iloc[0]), kinds, memory)
        groups = state.groupby(["module", "selection", "metric"], sort=False, dropna=False)
        for labels, rows in groups:
            module, selection, metric = (str(label) for label in labels)
            layer = rows["layer"].iloc[0]
            place = Place(module, None if pd.isna(layer) else int(layer))
            heads = rows.sort_values("head")
            if heads["sketch"].notna().any():
                pairs = zip(heads["moments"], heads["sketch"], strict=True)
                store.sketches[place, selection, metric] = [Sketch.restore(list(m), s) for m, s in pairs]
            else:
                store.add(place, selection, metric, [np.asarray(values) for values in heads["values"]])
        return store


def _pool(parts: Sequence[Any]) -> Any:
    return merged(parts) if isinstance(parts[0], Sketch) else np.concatenate(parts)


def _summaries(groups: Sequence[Any]) -> list[dict[str, object]]:
    if isinstance(groups[0], Sketch):
        return [sketch.summary(PERCENTILES) for sketch in groups]
    return summaries(groups)


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
    # At a value, or between two equal infinities, nothing has to be interpolated.
    return np.where((low == high) | (share == 0), low, between)
