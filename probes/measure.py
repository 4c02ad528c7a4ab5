"""Measure a model: run batches through it, and gather the statistics of every attention call as it happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from probes.accumulate import Place, Store
from probes.attention import AttentionCall
from probes.capture import Capture
from probes.selection import Full, Selection, parse
from probes.statistics import PER_QUERY, Block, per_query

BLOCK = 2**20
"""Logits looked at together: few enough to stay near the processor's caches, and memory stays flat."""


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
        place = Place(call.module_name, call.layer)
        for selection in self.selections:
            for metric, heads in _statistics(call, selection, real).items():
                self.store.add(place, selection.name, metric, heads)


def _statistics(call: AttentionCall, selection: Selection, real: Tensor) -> dict[str, list[Any]]:
    batch, heads, queries, keys = call.shape
    rows = max(1, BLOCK // max(1, batch * heads * keys))
    queried: dict[str, list[Tensor]] = {name: [] for name in PER_QUERY}
    counts = torch.zeros(batch, heads, keys, dtype=torch.float64, device=call.device)
    mass, seen = counts.clone(), torch.zeros(batch, heads, keys, dtype=torch.bool, device=call.device)
    for start in range(0, queries, rows):
        index = slice(start, min(start + rows, queries))
        block = Block(call.logits(index), call.allowed(index), call.sinks)
        kept = selection.keep(block.logits, block.allowed, start=start, call=call)
        values = per_query(block, kept)
        counted = real[:, None, index, None]
        mass += values.pop("weights").masked_fill(~counted, 0.0).sum(-2)
        counts += (kept & counted).sum(-2)
        seen |= (block.allowed & counted).any(-2)
        for name, value in values.items():
            queried[name].append(value)
    result: dict[str, list[Any]] = {}
    for name, blocks in queried.items():
        together = torch.cat(blocks, -1).transpose(0, 1)[:, real] if blocks else torch.empty(heads, 0)
        result[name] = list(together.double().cpu().numpy())
    kept_mean = torch.where(real, torch.cat(queried["kept"], -1).nan_to_num(0).transpose(0, 1), 0.0)
    keeping = ((kept_mean > 0).sum(-1) / kept_mean.sum(-1)).transpose(0, 1)  # (batch, head)
    per_key = {"sink_ratio": counts * keeping[..., None], "queries_per_key": counts, "attention_received": mass}
    for name, value in per_key.items():
        result[name] = [np.asarray(value[:, h][seen[:, h]].cpu().numpy()) for h in range(heads)]
    return result


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
