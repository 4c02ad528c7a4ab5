"""Read each row of logits once for its smallest and largest values: compiled by numba, the extra `fast`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FEW_ROWS = 64
"""Rows below which a second thread costs more than it saves."""


@numba.njit(cache=True, nogil=True)
def _scan(
    logits: NDArray[Any],
    allowed: NDArray[np.bool_],
    masked: bool,
    low: NDArray[Any],
    values: NDArray[Any],
    indices: NDArray[np.int64],
) -> None:
    batch, heads, rows, keys = logits.shape
    number = values.shape[-1]
    for b in range(batch):
        for h in range(heads):
            for q in range(rows):
                best, where = values[b, h, q], indices[b, h, q]
                best[:] = -np.inf
                smallest = np.inf
                broken = False
                worst = -np.inf
                filled = 0
                for j in range(keys):
                    if masked and not allowed[b, h, q, j]:
                        continue
                    z = logits[b, h, q, j]
                    if z != z:
                        broken = True
                    smallest = min(smallest, z)
                    if filled < number or z > worst:
                        place = min(filled, number - 1)
                        while place > 0 and best[place - 1] < z:
                            best[place] = best[place - 1]
                            where[place] = where[place - 1]
                            place -= 1
                        best[place] = z
                        where[place] = j
                        filled = min(filled + 1, number)
                        worst = best[number - 1]
                low[b, h, q] = np.nan if broken else smallest
                for place in range(filled, number):
                    where[place] = place % keys


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="probes")


def extremes_and_leading(logits: Tensor, allowed: Tensor | None, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `leading.extremes_and_leading`, on a CPU.

    Args:
        logits: (batch, head, query, key), float32 or float64.
        allowed: the same shape, or None.
        number: how many of the largest.

    Returns:
        Smallest, largest in falling order, keys of the largest.
    """
    shape = logits.shape[:-1]
    low = torch.empty(shape, dtype=logits.dtype)
    values = torch.empty(*shape, number, dtype=logits.dtype)
    indices = torch.zeros(*shape, number, dtype=torch.int64)
    scores = logits.detach().contiguous().numpy()
    mask = np.ones((1, 1, 1, 1), dtype=np.bool_) if allowed is None else allowed.numpy()
    whole = (low.numpy(), values.numpy(), indices.numpy())
    threads = torch.get_num_threads()
    rows = shape[-1]
    if threads == 1 or rows < FEW_ROWS:
        _scan(scores, mask, allowed is not None, *whole)
        return low, values, indices
    step = -(-rows // threads)
    cuts = [slice(first, first + step) for first in range(0, rows, step)]
    parts = [
        (scores[:, :, c], mask if allowed is None else mask[:, :, c], allowed is not None, *(w[:, :, c] for w in whole))
        for c in cuts
    ]
    list(_pool(threads).map(lambda part: _scan(*part), parts))
    return low, values, indices
