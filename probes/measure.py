"""Measure a model: run batches through it, and gather the statistics of every attention call as it happens."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from probes.accumulate import MEMORY, Place, Store
from probes.attention import AttentionCall
from probes.capture import Capture, check_on_missing
from probes.capture.audit import Findings
from probes.raw import RawWriter
from probes.scan import Outcome, scan
from probes.selection import Full, Selection, parse


class Watch:
    """Gathers statistics of every attention call of a model while it is open as a context.

    Args:
        model: any torch module.
        selections: what each query is to keep: selections or their short names; `full` where omitted.
        name: the model's name in the table; its class where omitted.
        include_padding: count padded queries too.
        queries: the share of the queries to look at, chosen at random; what is summed over queries is scaled up.
        seed: of that choice.
        on_missing: what to do at the end if a layer that looks like attention ran and could not be read.
        memory: bytes of values to keep for exact percentiles; past it sketches take their place.
        raw: a new folder to write every query's own values into, as a Parquet data set.

    Attributes:
        batch: number of the batch that is running, for `raw` and the choice of queries.
        findings: what could not be read, and layers that mix tokens without softmax attention.
        calls: number of attention calls seen.
        nan: number of queries with a NaN logit, by module.

    Raises:
        ValueError: if an argument is not as described.
    """

    def __init__(
        self,
        model: nn.Module,
        selections: Sequence[Selection | str] | None = None,
        *,
        name: str | None = None,
        include_padding: bool = False,
        queries: float = 1.0,
        seed: int = 0,
        on_missing: Literal["raise", "warn"] = "raise",
        memory: int = MEMORY,
        raw: str | os.PathLike[str] | None = None,
    ) -> None:
        self.selections = [parse(s) for s in ([Full()] if selections is None else selections)]
        names = [selection.name for selection in self.selections]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"Expected `selections` to be one or more different ones, but got {names}.")
        if not 0 < queries <= 1:
            raise ValueError(f"Expected `queries` to be a share above 0 and at most 1, but got {queries!r}.")
        check_on_missing(on_missing)
        self.findings = Findings()
        self.calls = 0
        self.batch = 0
        self.nan: dict[str, int] = {}
        self.store = Store(name or type(model).__name__, {s.name: s.kind for s in self.selections}, memory)
        self._include_padding = include_padding
        self._share = queries
        self._seed = seed
        self._on_missing = on_missing
        self._raw = None if raw is None else RawWriter(raw)
        self._in_batch = (0, 0)
        self._capture = Capture(model, self._receive, self.findings)

    def __enter__(self) -> Watch:
        self._capture.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._capture.__exit__(kind, error, trace)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise or warn, as `on_missing` says, if a layer has been missed so far."""
        self.findings.report(self._on_missing)

    def check_first(self) -> None:
        """Raise if a layer has been missed so far and that is an error; a warning can wait for the end."""
        if self._on_missing == "raise":
            self.check()

    def table(self) -> pd.DataFrame:
        """Everything gathered so far.

        Returns:
            The measurement table. Its `attrs` name what was missed (`missing`), what is not softmax attention
            (`not_softmax_attention`) and how many queries of which module had NaN logits (`nan`).
        """
        table = self.store.table()
        table.attrs["missing"] = dict(self.findings.missing)
        table.attrs["not_softmax_attention"] = dict(self.findings.other)
        table.attrs["nan"] = dict(self.nan)
        return table

    def _receive(self, call: AttentionCall) -> None:
        batch, _, count, _ = call.shape
        real = call.queries
        if real is None or self._include_padding:
            real = torch.ones(batch, count, dtype=torch.bool, device=call.device)
        rows = None if self._share == 1 else self._sample(count).to(call.device)
        self.calls += 1
        result = scan(call, self.selections, real, rows)
        if result.invalid:
            self.nan[call.module_name] = self.nan.get(call.module_name, 0) + result.invalid
            message = f"{result.invalid} queries of {call.module_name} have NaN logits; they are counted as undefined."
            warnings.warn(message, stacklevel=2)
        sampled = real if rows is None else real[:, rows]
        scale = 1.0 if rows is None else real.sum() / sampled.sum().clamp(min=1)
        place = Place(call.module_name, call.layer)
        for selection, outcome in zip(self.selections, result.outcomes, strict=True):
            for metric, values in _columns(outcome, selection.per_query, result.seen, sampled, scale).items():
                self.store.add(place, selection.name, metric, values)
            if self._raw is not None:
                self._raw.add(self.batch, call, selection, outcome, sampled, rows)

    def _sample(self, count: int) -> Tensor:
        # The choice hangs on the batch and the call in it alone, so that parts of a measurement make the same one.
        batch, number = self._in_batch
        self._in_batch = (self.batch, number + 1 if batch == self.batch else 0)
        generator = torch.Generator().manual_seed(hash((self._seed, *self._in_batch)) % 2**63)
        return torch.randperm(count, generator=generator)[: max(1, round(self._share * count))].sort().values


def _columns(
    outcome: Outcome, size: int | None, seen: Tensor, real: Tensor, scale: float | Tensor
) -> dict[str, list[Any]]:
    # One array of values a head for each metric, without padding.
    columns = {name: list(value.transpose(0, 1)[:, real].cpu().numpy()) for name, value in outcome.queried.items()}
    kept = outcome.queried["kept"].double().nan_to_num(0.0) * real[:, None]
    # k where the rule fixes it (all keys, where no query has so many), else the mean number kept: (batch, head)
    per_query = kept.sum(-1) / (kept > 0).sum(-1) if size is None else kept.amax(-1).clamp(max=size)
    per_key = {
        "sink_ratio": outcome.counts * scale / per_query[..., None],
        "queries_per_key": outcome.counts * scale,
        "attention_received": outcome.mass * scale,
    }
    for name, value in per_key.items():
        columns[name] = [value[:, head][seen[:, head]].cpu().numpy() for head in range(value.shape[1])]
    return columns


watch = Watch


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    selections: Sequence[Selection | str] | None = None,
    *,
    name: str | None = None,
    include_padding: bool = False,
    queries: float = 1.0,
    seed: int = 0,
    on_missing: Literal["raise", "warn"] = "raise",
    memory: int = MEMORY,
    raw: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Run batches through a model and measure its attention.

    The model runs in evaluation mode and without gradients; its modes are restored. A ValueError says that there are no
    batches, that an argument is not as described, that the model attended nowhere, or (as `MissedAttention`) that a
    layer was missed.

    Args:
        model: any torch module.
        batches: mappings (`model(**batch)`), tuples or lists (`model(*batch)`), or tensors (`model(batch)`).
        selections: what each query is to keep: selections or their short names; `full` where omitted.
        name: the model's name in the table; its class where omitted.
        include_padding: count padded queries too.
        queries: the share of the queries to look at, chosen at random; what is summed over queries is scaled up.
        seed: of that choice.
        on_missing: what to do if a layer that looks like attention runs and can't be read: `raise`, or `warn`.
        memory: bytes of values to keep for exact percentiles; past it sketches take their place (column `error`).
        raw: a new folder to write every query's own values into, as a Parquet data set.
        progress: show a progress bar; where omitted, only on a terminal.

    Returns:
        The measurement table: one row for each module, head, selection and metric, with pooled rows for layers and the
        model; see `Watch.table` for its `attrs`.
    """
    if isinstance(batches, (Mapping, Tensor)):
        batches = [batches]
    watching = Watch(
        model,
        selections,
        name=name,
        include_padding=include_padding,
        queries=queries,
        seed=seed,
        on_missing=on_missing,
        memory=memory,
        raw=raw,
    )
    watch_batches(model, batches, watching, progress=progress)
    return watching.table()


def watch_batches(
    model: nn.Module,
    batches: Iterable[Any],
    watching: Watch,
    *,
    shard: tuple[int, int] = (1, 1),
    progress: bool | None = None,
) -> None:
    """Run batches through a model that is being watched, in evaluation mode and without gradients.

    Args:
        model: the model.
        batches: as for `measure`.
        watching: where the statistics go.
        shard: (i, n), to run only the i-th of every n batches, counted from 1.
        progress: show a progress bar; where omitted, only on a terminal.

    Raises:
        ValueError: if there are no batches, the model attended nowhere, or (as `MissedAttention`) a layer was missed.
    """
    number, total = shard
    seen = False
    with evaluating(model), torch.no_grad(), watching:
        chosen = ((i, batch) for i, batch in enumerate(batches) if i % total == number - 1)
        for watching.batch, batch in tqdm(
            chosen, desc="measuring", unit="batch", disable=None if progress is None else not progress
        ):
            run(model, batch)
            if not seen:
                watching.check_first()
            seen = True
    if not seen:
        raise ValueError("Expected at least one batch to measure, but got none.")
    if not watching.calls:
        other = "; ".join(f"{name} ({what})" for name, what in watching.findings.other.items())
        raise ValueError(
            f"Expected a model with softmax attention, but {type(model).__name__} ran without any"
            f"{': it has ' + other if other else ''}."
        )


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model with one batch, on the device of its parameters.

    Args:
        model: the model.
        batch: a mapping, a tuple or list, or a tensor.

    Returns:
        What the model returns.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return model(**{key: there(value) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        return model(*(there(value) for value in batch))
    return model(there(batch))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode, and restore each module's own mode afterwards.

    Args:
        model: the model.

    Yields:
        Nothing.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
