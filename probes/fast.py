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


CHUNK = 64
"""Keys whose extremes are taken together; only where the largest counts are they looked at one by one."""


@numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc"})
def _extremes(row: NDArray[Any]) -> tuple[Any, Any]:
    low = high = row[0]
    for z in row:
        low = min(low, z)
        high = max(high, z)
    return low, high


@numba.njit(cache=True, nogil=True)
def _insert(best: NDArray[Any], where: NDArray[np.int64], z: Any, key: int) -> None:
    place = len(best) - 1
    while place > 0 and best[place - 1] < z:
        best[place] = best[place - 1]
        where[place] = where[place - 1]
        place -= 1
    best[place] = z
    where[place] = key


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
                where[:] = np.arange(number)
                smallest = np.inf
                for first in range(0, keys, CHUNK):
                    last = min(first + CHUNK, keys)
                    row = logits[b, h, q, first:last]
                    some = allowed[b, h, q, first:last] if masked else allowed[0, 0, 0, :0]
                    if masked and not some.all():
                        for j in range(last - first):
                            if some[j]:
                                smallest = min(smallest, row[j])
                                if row[j] > best[number - 1]:
                                    _insert(best, where, row[j], first + j)
                        continue
                    lowest, highest = _extremes(row)
                    smallest = min(smallest, lowest)
                    if highest > best[number - 1]:
                        for j in range(last - first):
                            if row[j] > best[number - 1]:
                                _insert(best, where, row[j], first + j)
                low[b, h, q] = smallest


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
