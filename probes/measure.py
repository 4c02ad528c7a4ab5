"""Measure a model: run batches through it, and gather the statistics of every attention call as it happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from probes.accumulate import Place, Store
from probes.attention import AttentionCall
from probes.capture import Capture
from probes.scan import Outcome, scan
from probes.selection import Full, Selection, parse


class Watch:
    """Gathers statistics of every attention call of a model while it is open as a context.

    Args:
        model: any torch module.
        selections: what each query is to keep: selections or their short names.
        name: the model's name in the table; its class where omitted.
        include_padding: count padded queries too.
    """

    def __init__(
        self,
        model: nn.Module,
        selections: Sequence[Selection | str] | None = None,
        *,
        name: str | None = None,
        include_padding: bool = False,
    ) -> None:
        self.selections = [parse(s) for s in ([Full()] if selections is None else selections)]
        self._include_padding = include_padding
        self._capture = Capture(model, self._receive)
        self.store = Store(name or type(model).__name__, {s.name: s.kind for s in self.selections})
        self.calls = 0

    def __enter__(self) -> Watch:
        self._capture.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._capture.__exit__(*error)

    def table(self) -> pd.DataFrame:
        """Everything gathered so far.

        Returns:
            The measurement table.
        """
        return self.store.table()

    def _receive(self, call: AttentionCall) -> None:
        self.calls += 1
        real = call.queries
        if real is None or self._include_padding:
            real = torch.ones(call.shape[0], call.shape[2], dtype=torch.bool, device=call.device)
        result = scan(call, self.selections, real)
        place = Place(call.module_name, call.layer)
        for selection, outcome in zip(self.selections, result.outcomes, strict=True):
            for metric, values in _columns(outcome, result.seen, real).items():
                self.store.add(place, selection.name, metric, values)


def _columns(outcome: Outcome, seen: Tensor, real: Tensor) -> dict[str, list[Any]]:
    # One array of values a head for each metric, without padding.
    columns = {name: list(value.transpose(0, 1)[:, real].cpu().numpy()) for name, value in outcome.queried.items()}
    kept = outcome.queried["kept"].double().nan_to_num(0.0) * real[:, None]
    per_query = kept.sum(-1) / (kept > 0).sum(-1)  # (batch, head), mean number of keys kept
    per_key = {
        "sink_ratio": outcome.counts / per_query[..., None],
        "queries_per_key": outcome.counts,
        "attention_received": outcome.mass,
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
    progress: bool | None = None,
) -> pd.DataFrame:
    """Run batches through a model and measure its attention.

    The model runs in evaluation mode and without gradients; its modes are restored.

    Args:
        model: any torch module.
        batches: mappings (`model(**batch)`), tuples or lists (`model(*batch)`), or tensors (`model(batch)`).
        selections: what each query is to keep: selections or their short names; `full` where omitted.
        name: the model's name in the table; its class where omitted.
        include_padding: count padded queries too.
        progress: show a progress bar; where omitted, only on a terminal.

    Returns:
        The measurement table: one row for each module, head, selection and metric, with pooled rows for layers and
        the model.

    Raises:
        ValueError: if there are no batches, or the model attended nowhere.
    """
    if isinstance(batches, (Mapping, Tensor)):
        batches = [batches]
    seen = False
    with (
        _evaluating(model),
        torch.no_grad(),
        Watch(model, selections, name=name, include_padding=include_padding) as watching,
    ):
        for batch in tqdm(batches, desc="measuring", unit="batch", disable=None if progress is None else not progress):
            seen = True
            run(model, batch)
    if not seen:
        raise ValueError("Expected at least one batch to measure, but got none.")
    if not watching.calls:
        raise ValueError(
            f"Expected a model with softmax attention, but {type(model).__name__} ran without any that could be read."
        )
    return watching.table()


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
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, restored module by module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
