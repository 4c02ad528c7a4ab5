"""Loss and accuracy of a model on labelled sequences, and the order in which they are fed to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stability.tasks import IGNORED

EVALUATION_BATCH = 100
"""Sequences fed at once where nothing is learned; larger batches fall out of the processor's cache."""


def loss_fn(
    outputs: Float[Tensor, "*sample classes"], labels: Int[Tensor, "*sample"], reduction: str = "mean"
) -> Float[Tensor, ""]:
    """Cross-entropy over the labels that count.

    Args:
        outputs: class scores.
        labels: classes; `IGNORED` ones do not count.
        reduction: `mean` or `sum`.

    Returns:
        A scalar, in nats.
    """
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


@torch.inference_mode()
def evaluate(
    model: nn.Module, sequences: Int[Tensor, "sample token"], labels: Int[Tensor, sample * token]
) -> tuple[float, float]:
    """Judge a model in evaluation mode, without dropout; its mode is restored.

    Args:
        model: from sequences to class scores.
        sequences: token indices.
        labels: a class for each sequence, or for each token with `IGNORED` where there is none.

    Returns:
        Mean cross-entropy in nats, and the share of right answers, over the labels that count.
    """
    training = model.training
    model.eval()
    loss, right, count = 0.0, 0, 0
    for inputs, targets in batches(sequences, labels, EVALUATION_BATCH):
        outputs = model(inputs)
        loss += float(loss_fn(outputs, targets, reduction="sum"))
        counted = targets != IGNORED
        right += int(((outputs.argmax(-1) == targets) & counted).sum())
        count += int(counted.sum())
    model.train(training)
    return (loss / count, right / count) if count else (float("nan"), float("nan"))


def batches(
    sequences: Tensor, labels: Tensor, size: int, order: Int[Tensor, " sample"] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go over labelled sequences once.

    Args:
        sequences: token indices.
        labels: their labels.
        size: sequences in a batch; the last one may have fewer.
        order: of the sequences; as they are where omitted.

    Yields:
        Sequences and labels of one batch.
    """
    for first in range(0, len(sequences), size):
        index = slice(first, first + size) if order is None else order[first : first + size]
        yield sequences[index], labels[index]
