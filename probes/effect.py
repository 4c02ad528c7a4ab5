"""What a selection does to the model itself: loss, perplexity, accuracy and outputs with the selection in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from probes.apply import apply
from probes.measure import run
from probes.selection import Selection, parse

IGNORED = -100
"""The label that counts for nothing, as in torch's cross-entropy."""

Score = Callable[[Any, Any], Mapping[str, Tensor]]


def effect(
    model: nn.Module,
    batches: Iterable[Any],
    selections: Sequence[Selection | str],
    *,
    labels: Iterable[Tensor] | None = None,
    score: Score | None = None,
) -> pd.DataFrame:
    """Run a model as it is and with each selection in place, and report what changes.

    The model runs in evaluation mode and without gradients; its modes are restored. Columns: `selection`, `kind`;
    `loss` (cross-entropy in nats), `perplexity` (its exponential) and `accuracy` where there are labels, or what
    `score` names; for each its change against the model as it is, `loss_change` and so on; `output_change`, the size of
    the change of the outputs relative to that of the outputs, at positions that are not padding. The first row, `as it
    is`, is the model without any selection.

    Args:
        model: any torch module.
        batches: as `probes.measure` takes them; a batch's own "labels" count.
        selections: selections or their short names.
        labels: one tensor for each batch, where batches hold none; -100 counts for nothing.
        score: what to report instead: told a batch's output and the batch, values by name, which are averaged.

    Returns:
        One row for each selection, and one before them.

    Raises:
        ValueError: if there are no batches, or labels and batches differ in number.
    """
    if isinstance(batches, (Mapping, Tensor)):
        batches = [batches]
    if isinstance(selections, (str, Selection)):
        selections = [selections]
    chosen = [parse(selection) for selection in selections]
    given = list(batches)
    targets = [None] * len(given) if labels is None else list(labels)
    if not given:
        raise ValueError("Expected at least one batch, but got none.")
    if len(targets) != len(given):
        raise ValueError(f"Expected one tensor of labels for each of {len(given)} batches, but got {len(targets)}.")
    training = [module for module in model.modules() if module.training]
    model.eval()
    rows: list[dict[str, Any]] = []
    plain: list[Tensor] = []
    try:
        for selection in (None, *chosen):
            with torch.no_grad(), contextlib.nullcontext() if selection is None else apply(model, selection):
                scores, outputs = _scores(model, given, targets, score)
            plain = plain or outputs
            row = {"selection": "as it is", "kind": ""}
            if selection is not None:
                row = {"selection": selection.name, "kind": selection.kind}
            changes = {f"{key}_change": value - rows[0][key] if rows else 0.0 for key, value in scores.items()}
            rows.append(row | scores | changes | {"output_change": _change(outputs, plain, given)})
    finally:
        for module in training:
            module.training = True
    return pd.DataFrame(rows)


def supervised(output: Any, labels: Tensor) -> dict[str, Tensor]:
    """Cross-entropy and accuracy of each labelled position.

    Language models are scored on the next token where their own loss is: if the output carries a loss, the reading of
    the labels (shifted by one or not) that agrees with it is taken.

    Args:
        output: what the model returned; its logits have one dimension more than the labels.
        labels: class numbers; -100 counts for nothing.

    Returns:
        `loss` in nats and `accuracy`, one value a position.

    Raises:
        ValueError: if the shapes of logits and labels don't go together.
    """
    logits = outcome(output).float()
    labels = labels.to(logits.device)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"Expected labels of shape {tuple(logits.shape[:-1])} for logits of shape {tuple(logits.shape)}, "
            f"but got {tuple(labels.shape)}."
        )
    readings = [(logits, labels)]
    own = getattr(output, "loss", None)
    if labels.ndim > 1 and isinstance(own, Tensor):
        readings.append((logits[:, :-1], labels[:, 1:]))
    scored = []
    for given, wanted in readings:
        counted = wanted != IGNORED
        loss = F.cross_entropy(given[counted], wanted[counted], reduction="none")
        scored.append({"loss": loss, "accuracy": (given[counted].argmax(-1) == wanted[counted]).float()})
    if len(scored) > 1 and own is not None:
        scored.sort(key=lambda values: float((values["loss"].mean() - own).abs()))
    return scored[0]


def outcome(output: Any) -> Tensor:
    """The main tensor of a model's output.

    Args:
        output: a tensor, a tuple, a mapping or an object with `logits` or `last_hidden_state`.

    Returns:
        Its logits, last hidden state or first tensor.

    Raises:
        ValueError: if there is no tensor.
    """
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point():
            return part
    raise ValueError(f"Expected a model that returns a tensor, but got {type(output).__name__}.")


def _scores(
    model: nn.Module, batches: Sequence[Any], labels: Sequence[Tensor | None], score: Score | None
) -> tuple[dict[str, float], list[Tensor]]:
    values: dict[str, list[Tensor]] = {}
    outputs = []
    for batch, given in zip(batches, labels, strict=True):
        output = run(model, batch)
        outputs.append(outcome(output))
        target = batch.get("labels") if given is None and isinstance(batch, Mapping) else given
        found = score(output, batch) if score else {} if target is None else supervised(output, target)
        for name, value in found.items():
            values.setdefault(name, []).append(value.double().flatten())
    means = {name: float(torch.cat(parts).mean()) for name, parts in values.items()}
    if "loss" in means and score is None:
        means = {"loss": means["loss"], "perplexity": float(torch.tensor(means["loss"]).exp()), **means}
    return means, outputs


def _change(outputs: Sequence[Tensor], plain: Sequence[Tensor], batches: Sequence[Any]) -> float:
    change = size = 0.0
    for now, before, batch in zip(outputs, plain, batches, strict=True):
        real = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(real, Tensor) and real.shape == before.shape[: real.ndim]:
            counted = real.to(before.device) != 0
            now, before = now[counted], before[counted]
        change += float((now - before).double().square().sum())
        size += float(before.double().square().sum())
    return (change / size) ** 0.5 if size else float("nan")
