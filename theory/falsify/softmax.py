"""Softmax on its own: derivatives, finite changes, changing kept sets, and what truncation costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from theory import softmax
from theory.bound import Bound
from theory.falsify.search import Array, Problem

NDArrayBool = NDArray[np.bool_]
# Two vectors that differ by less leave too few digits to measure a ratio to 1e-9.
_NEAREST = 1e-5


def weights_of(logits: Array, kept: NDArrayBool | None = None) -> Array:
    """Softmax over the last axis.

    Args:
        logits: in nats.
        kept: which keys take part, all where omitted.

    Returns:
        The weights, 0 where not kept.
    """
    masked = logits if kept is None else np.where(kept, logits, -np.inf)
    grown = np.exp(masked - masked.max(-1, keepdims=True))
    return np.asarray(grown / grown.sum(-1, keepdims=True))


def spread_of(logits: Array, kept: NDArrayBool) -> Array:
    """Dispersion over the kept keys.

    Args:
        logits: in nats.
        kept: the kept keys, at least one a row.

    Returns:
        One number a row.
    """
    return np.asarray(np.where(kept, logits, -np.inf).max(-1) - np.where(kept, logits, np.inf).min(-1))


def gap_of(logits: Array, kept: NDArrayBool) -> Array:
    """Separation of the kept keys from the others, +inf where all are kept.

    Args:
        logits: in nats.
        kept: the kept keys, at least one a row.

    Returns:
        One number a row.
    """
    return np.asarray(np.where(kept, logits, np.inf).min(-1) - np.where(kept, -np.inf, logits).max(-1))


def top(logits: Array, keys: int) -> NDArrayBool:
    """The largest logits of each row, the lowest index first among equals.

    Args:
        logits: in nats.
        keys: how many to keep.

    Returns:
        The kept keys.
    """
    order = np.argsort(-logits, axis=-1, kind="stable")
    kept = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(kept, order[..., :keys], True, axis=-1)
    return kept


class Point(Problem):
    """The Jacobian of softmax at one logit vector."""

    def __init__(self, keys: int) -> None:
        self.name, self.size = f"softmax Jacobian, {keys} keys", keys
        bits = np.arange(2**keys)[:, None] >> np.arange(keys) & 1
        self._sets = bits.astype(np.float64)
        generator = np.random.default_rng(keys)
        pairs = np.eye(keys)[0] - np.eye(keys)[1:]
        self._directions = np.concatenate([pairs, np.eye(keys), generator.standard_normal((30, keys))])

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """See `Problem.bounds`."""
        return {
            "largest": softmax.largest_probability,
            "published": softmax.full,
            "sharp": softmax.full_sharp,
            "inf to 1": softmax.inf_to_one,
            "p to p": softmax.p_to_p,
            "spectral": softmax.spectral,
        }

    def measure(self, points: Array) -> tuple[dict[str, Array], Mapping[str, Array]]:
        """See `Problem.measure`.

        Args:
            points: logits, shape (batch, keys).

        Returns:
            Norms of the Jacobian, and dispersion, keys and the two largest weights.
        """
        weights = weights_of(points)
        jacobian = np.einsum("bi,ij->bij", weights, np.eye(self.size)) - weights[:, :, None] * weights[:, None]
        masses = weights @ self._sets.T
        moved = np.einsum("bij,uj->bui", jacobian, self._directions)
        between = [
            (np.linalg.norm(moved, p, axis=-1) / np.linalg.norm(self._directions, p, axis=-1)).max(1)
            for p in (1.0, 1.5, 3.0, np.inf)
        ]
        spectral = np.linalg.eigvalsh(jacobian)[:, -1]
        one = softmax.one_norm(weights)
        ordered = np.sort(weights, 1)
        measured = {
            "largest": ordered[:, -1],
            "published": one,
            "sharp": one,
            "inf to 1": (4 * masses * (1 - masses)).max(1),
            "p to p": np.max([*between, spectral], axis=0),
            # A weight so close to 1 leaves too few digits in 1 - p1 to judge the bound.
            "spectral": np.where(spectral > _NEAREST, spectral, 0),
        }
        quantities = {
            "dispersion": np.ptp(points, axis=1),
            "keys": np.full(len(points), float(self.size)),
            "largest_probability": ordered[:, -1],
            "second_probability": ordered[:, -2],
        }
        return measured, quantities

    def structured(self) -> Array:
        """One logit above equal others, or half of them.

        Returns:
            Logit vectors.
        """
        heights = np.concatenate([np.linspace(0, 8, 33), [30.0, 300.0]])[:, None]
        one, half = np.eye(self.size)[0], (np.arange(self.size) < self.size / 2).astype(float)
        return np.concatenate([heights * one, heights * half, np.log(self.size - 1) * one[None]])


class Pair(Problem):
    """Two logit vectors over the same keys, a finite change apart."""

    def __init__(self, keys: int) -> None:
        self.name, self.size, self._keys = f"softmax, finite change, {keys} keys", 2 * keys, keys

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """See `Problem.bounds`."""
        return {"published": softmax.full, "sharp": softmax.full_sharp, "tanh": softmax.total_variation}

    def measure(self, points: Array) -> tuple[dict[str, Array], Mapping[str, Array]]:
        """See `Problem.measure`.

        Args:
            points: the two logit vectors, shape (batch, 2 keys).

        Returns:
            Ratios of 1-norms and the total variation, and dispersion, keys and the largest change.
        """
        pair = points.reshape(-1, 2, self._keys)
        change = pair[:, 0] - pair[:, 1]
        moved = np.abs(np.diff(weights_of(pair), axis=1)[:, 0]).sum(1)
        distance = np.abs(change).sum(1)
        ratio = np.where(distance > _NEAREST, moved / np.maximum(distance, _NEAREST), 0)
        measured = {"published": ratio, "sharp": ratio, "tanh": np.where(distance > _NEAREST, moved / 2, 0)}
        quantities = {
            "dispersion": np.ptp(pair, axis=2).max(1),
            "keys": np.full(len(points), float(self._keys)),
            "logit_change": np.abs(change).max(1),
        }
        return measured, quantities

    def structured(self) -> Array:
        """Balanced weights pushed apart by opposite changes.

        Returns:
            Pairs of logit vectors.
        """
        one = np.eye(self._keys)[0]
        base = np.log(max(self._keys - 1, 1)) * one
        pushes = np.geomspace(1e-3, 20, 25)[:, None]
        opposite = pushes * (2 * one - 1) / 2
        return np.concatenate(
            [
                np.concatenate([base + opposite, base - opposite], axis=1),
                np.concatenate([base + 0 * opposite, base + pushes * one], axis=1),
                np.concatenate([pushes * one, pushes * one + 1e-3 * one], axis=1),
            ]
        )


class SetPair(Problem):
    """Two logit vectors whose k largest keys may differ."""

    def __init__(self, length: int, keys: int) -> None:
        self.name, self.size = f"top-{keys} of {length}, finite change", 2 * length
        self._length, self._keys = length, keys

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """See `Problem.bounds`."""
        return {"published": softmax.heavy_hitter, "sharp": softmax.heavy_hitter_sharp, "tail": softmax.tail_mass}

    def measure(self, points: Array) -> tuple[dict[str, Array], Mapping[str, Array]]:
        """See `Problem.measure`.

        Args:
            points: the two logit vectors, shape (batch, 2 length).

        Returns:
            Ratios of 1-norms and the mass that the first vector's selection cuts off; dispersion, separation and sizes.
        """
        pair = points.reshape(-1, 2, self._length)
        kept = top(pair, self._keys)
        weights = weights_of(pair, kept)
        union = kept.any(1)
        distance = np.where(union, np.abs(pair[:, 0] - pair[:, 1]), 0).sum(1)
        moved = np.abs(weights[:, 0] - weights[:, 1]).sum(1)
        ratio = np.where(distance > _NEAREST, moved / np.maximum(distance, _NEAREST), 0)
        everything = weights_of(pair)
        # The certificate speaks of one vector: of the one with the smaller separation, which the quantities describe.
        gaps = gap_of(pair, kept)
        tails = np.where(kept, 0, everything).sum(-1)
        tail = np.take_along_axis(tails, gaps.argmin(1)[:, None], 1)[:, 0]
        quantities = {
            "dispersion": spread_of(pair, kept).max(1),
            "separation": gaps.min(1),
            "keys": np.full(len(points), float(self._keys)),
            "length": np.full(len(points), float(self._length)),
        }
        return {"published": ratio, "sharp": ratio, "tail": tail}, quantities

    def structured(self) -> Array:
        """Two vectors that exchange r kept keys for r masked ones, all logits on two levels, or that move one kept key.

        Returns:
            Pairs of logit vectors.
        """
        rows = []
        for gap in (1e-3, 0.1, 0.5, 1.0, 2.0, 4.0, 100.0):
            for exchanged in range(min(self._keys, self._length - self._keys) + 1):
                first = np.full(self._length, -0.5 * gap)
                first[: self._keys] = 0.5 * gap
                second = np.full(self._length, -0.5 * gap)
                second[exchanged : exchanged + self._keys] = 0.5 * gap
                moved = first.copy()
                moved[0] += 1e-3
                rows += [np.concatenate([first, second]), np.concatenate([moved, second])]
        return np.array(rows)
