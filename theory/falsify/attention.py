r"""One attention layer: derivatives and finite changes of :math:`A(X) = V X\, \mathrm{softmax}_K(X^T W X)`.

V is the identity: whatever a V of norm 1 does to the change of the mean tokens, it makes it no larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from theory import attention
from theory.bound import Bound
from theory.falsify.search import Array, Problem
from theory.falsify.softmax import gap_of, spread_of, top, weights_of
from theory.softmax import spectral_factor

Kind = Literal["full", "regular", "heavy-hitter"]
_THEOREM = {"full": attention.full, "regular": attention.regular, "heavy-hitter": attention.heavy_hitter}
_NEAREST = 1e-5


class Layer(Problem):
    """What derivatives and finite changes share: shapes, logits, kept sets, quantities."""

    def __init__(self, length: int, dim: int, kind: Kind, keys: int) -> None:
        self.length, self.dim, self.kind = length, dim, kind
        self.keys = length if kind == "full" else keys
        self.theorem = _THEOREM[kind]
        angles = np.linspace(0, np.pi, 16, endpoint=False)
        plane = np.stack([np.cos(angles), np.sin(angles)], 1)
        self.directions = np.eye(dim) if dim != 2 else plane  # (direction, dim), unit vectors
        turns = np.array([[[c, -s], [s, c]] for c, s in np.concatenate([plane, -plane])])
        ones = np.einsum("ui,vj->uvij", plane, plane).reshape(-1, 2, 2)
        self.maps = np.concatenate([ones, turns, turns * [1, -1]])  # (map, 2, 2), spectral norm 1

    def logits(self, tokens: Array, score: Array) -> Array:
        """Scores of key j for query i.

        Args:
            tokens: shape (batch, length, dim).
            score: W, shape (batch, dim, dim).

        Returns:
            Shape (batch, query, key).
        """
        return np.asarray(np.einsum("bki,bij,bqj->bqk", tokens, score, tokens, optimize=True))

    def keep(self, logits: Array) -> NDArray[np.bool_]:
        """The kept keys: all, a ring of neighbours, or the largest.

        Args:
            logits: shape (batch, query, key).

        Returns:
            Same shape.
        """
        if self.kind == "heavy-hitter":
            return top(logits, self.keys)
        offset = (np.arange(self.length)[None] - np.arange(self.length)[:, None]) % self.length
        return np.broadcast_to(offset < self.keys, logits.shape)

    def quantities(self, tokens: Array, score: Array, logits: Array, kept: NDArray[np.bool_]) -> dict[str, Array]:
        """What the theorems' constants depend on.

        Args:
            tokens: shape (batch, length, dim).
            score: shape (batch, dim, dim).
            logits: shape (batch, query, key).
            kept: same shape.

        Returns:
            Arrays of shape (batch,) by the names of symbols.
        """
        count = kept.sum(1).max(1).astype(np.float64)
        one = np.ones(len(tokens))
        # Only the largest logits are separated from the rest; a fixed set isn't.
        gap = gap_of(logits, kept).min(1) if self.kind == "heavy-hitter" else np.inf * one
        return {
            "dispersion": spread_of(logits, kept).max(1),
            "separation": gap,
            "sink_ratio": count / self.keys,
            "keys": self.keys * one,
            "length": self.length * one,
            "token_norm": np.linalg.norm(tokens, axis=-1).max(1),
            "score_norm": np.linalg.norm(score, 2, axis=(-2, -1)),
            "value_norm": one,
        }


class Derivative(Layer):
    """The Jacobian of one layer at one point, the kept sets held."""

    def __init__(self, length: int, dim: int, kind: Kind, keys: int) -> None:
        super().__init__(length, dim, kind, keys)
        self.name = f"{kind} attention Jacobian, {length} tokens, {self.keys} keys"
        self.size = length * dim + dim * dim

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """See `Problem.bounds`."""
        theorem = self.theorem
        if self.kind == "heavy-hitter":
            return {"local input": theorem.local_input_stability, "value": theorem.value_stability}
        return {
            "input": theorem.input_stability,
            "input sharp": theorem.sharp.input_stability,
            "parameter": theorem.parameter_stability,
            "parameter sharp": theorem.sharp.parameter_stability,
            "value": theorem.value_stability,
            "yudin": attention.yudin,
        }

    def measure(self, points: Array) -> tuple[dict[str, Array], Mapping[str, Array]]:
        """See `Problem.measure`.

        Args:
            points: tokens and W, shape (batch, size).

        Returns:
            Largest directional derivatives found, and the quantities of the theorems.
        """
        cut = self.length * self.dim
        tokens = points[:, :cut].reshape(-1, self.length, self.dim)
        score = points[:, cut:].reshape(-1, self.dim, self.dim)
        logits = self.logits(tokens, score)
        kept = self.keep(logits)
        weights = weights_of(logits, kept)  # (batch, query, key)
        blocks, covariance = jacobian_blocks(tokens, score, weights)
        moved = np.linalg.norm(np.einsum("bijde,ue->bijud", blocks, self.directions), axis=-1).sum(1)
        by_input = moved.max((1, 2))
        turned = np.einsum("bide,mef,bif->bmid", covariance, self.maps, tokens, optimize=True)
        by_parameter = np.linalg.norm(turned, axis=-1).sum(2).max(1)
        by_value = np.linalg.norm(weights @ tokens, axis=-1).sum(1)
        whole = blocks.transpose(0, 1, 3, 2, 4).reshape(len(points), cut, cut)
        measured = dict.fromkeys(("input", "input sharp", "local input"), by_input)
        measured |= {"parameter": by_parameter, "parameter sharp": by_parameter, "value": by_value}
        measured["yudin"] = np.linalg.norm(whole, 2, axis=(-2, -1))
        quantities = self.quantities(tokens, score, logits, kept) | {
            "score_spectral_norm": np.linalg.norm(weights, 2, axis=(-2, -1)),
            "tokens_spectral_norm": np.linalg.norm(tokens, 2, axis=(-2, -1)),
            "curvature": spectral_factor(weights).max(1),
        }
        return measured, quantities

    def structured(self) -> Array:
        """Two groups of opposite tokens under a W that exchanges coordinates, and equal tokens.

        Returns:
            Inputs.
        """
        rows = []
        for share in range(1, self.length):
            tokens = np.zeros((self.length, self.dim))
            tokens[:, 0] = np.where(np.arange(self.length) < share, 1.0, -1.0)
            rows += [
                np.concatenate([tokens.ravel(), strength * score.ravel()])
                for strength in (0.01, 1.0, 100.0)
                for score in (np.fliplr(np.eye(self.dim)), np.eye(self.dim))
            ]
        equal = np.tile(np.eye(self.dim)[0], self.length)
        rows.append(np.concatenate([equal, 1e-3 * np.eye(self.dim).ravel()]))
        return np.array(rows)


class Change(Layer):
    """A finite change of the tokens or of W; the kept sets may change with it."""

    def __init__(self, length: int, dim: int, kind: Kind, keys: int, varies: Literal["input", "parameter"]) -> None:
        super().__init__(length, dim, kind, keys)
        self.varies = varies
        self.name = f"{kind} attention, finite change of {varies}, {length} tokens, {self.keys} keys"
        self._cut = length * dim
        self.size = self._cut + dim * dim + (self._cut if varies == "input" else dim * dim)

    @cached_property
    def bounds(self) -> dict[str, Bound]:
        """See `Problem.bounds`."""
        if self.varies == "input":
            return {"published": self.theorem.input_stability, "sharp": self.theorem.sharp.input_stability}
        return {"published": self.theorem.parameter_stability, "sharp": self.theorem.sharp.parameter_stability}

    def measure(self, points: Array) -> tuple[dict[str, Array], Mapping[str, Array]]:
        """See `Problem.measure`.

        Args:
            points: tokens and W, then the change of one of them, shape (batch, size).

        Returns:
            Ratios of distances, and the worse of the two points' quantities.
        """
        tokens = points[:, : self._cut].reshape(-1, self.length, self.dim)
        score = points[:, self._cut : self._cut + self.dim**2].reshape(-1, self.dim, self.dim)
        change = points[:, self._cut + self.dim**2 :].reshape(len(points), -1, self.dim)
        if self.varies == "input":
            ends, distance = [(tokens, score), (tokens + change, score)], np.linalg.norm(change, axis=-1).sum(1)
        else:
            ends, distance = [(tokens, score), (tokens, score + change)], np.linalg.norm(change, 2, axis=(-2, -1))
        outputs, described = [], []
        for x, w in ends:
            logits = self.logits(x, w)
            kept = self.keep(logits)
            outputs.append(weights_of(logits, kept) @ x)
            described.append(self.quantities(x, w, logits, kept))
        worse = {name: np.maximum(described[0][name], described[1][name]) for name in described[0]}
        worse["separation"] = np.minimum(described[0]["separation"], described[1]["separation"])
        moved = np.linalg.norm(outputs[1] - outputs[0], axis=-1).sum(1)
        size = np.linalg.norm(outputs[0], axis=-1).sum(1)
        measurable = distance > _NEAREST * np.maximum(1, size)
        ratio = np.where(measurable, moved / np.maximum(distance, 1e-300), 0)
        return {"published": ratio, "sharp": ratio}, worse

    def structured(self) -> Array:
        """The counterexample's tokens with one of them moved, and half of the tokens opposite with W turned around.

        Returns:
            Inputs.
        """
        rows = []
        tilt = np.zeros((self.length, self.dim))
        tilt[:, 1] = 0.01 * np.arange(self.length)
        exchange = np.fliplr(np.eye(self.dim))
        first = np.eye(self.length)[:, :1]
        along, across = first * np.eye(self.dim)[0], first * np.eye(self.dim)[1]
        for share in range(1, self.length):
            tokens = np.zeros((self.length, self.dim))
            tokens[:, 0] = np.where(np.arange(self.length) < share, 1.0, -1.0)
            for strength, size in ((1.0, 1e-3), (1.0, 1.0), (30.0, 1e-3), (30.0, 0.1)):
                change = size * across if self.varies == "input" else size * np.eye(self.dim)
                rows.append([tokens + tilt, strength * exchange, change])
            for strength in (0.1, 0.25, 0.5, 1.0):
                # Queries exchange all their keys; Theorem 5 for W is reached at strength 1/4 and half of the tokens.
                score = strength * np.diag(np.eye(self.dim)[0])
                rows.append([tokens, score, -2 * along if self.varies == "input" else -2 * score])
        return np.array([np.concatenate([part.ravel() for part in row]) for row in rows])


def jacobian_blocks(tokens: Array, score: Array, weights: Array) -> tuple[Array, Array]:
    r"""The derivatives of output i with respect to token j, the kept sets held and V the identity.

    With :math:`a_i = \sum_l s_{li} x_l` and :math:`C_i = \sum_l s_{li} (x_l - a_i) x_l^T`, the block is
    :math:`s_{ji} (I + (x_j - a_i)(W x_i)^T) + [i = j]\, C_i W`.

    Args:
        tokens: shape (batch, length, dim).
        score: W, shape (batch, dim, dim).
        weights: shape (batch, query, key).

    Returns:
        The blocks, shape (batch, query, key, dim, dim), and the covariances, shape (batch, query, dim, dim).
    """
    means = weights @ tokens  # (batch, query, dim)
    centred = tokens[:, None] - means[:, :, None]  # (batch, query, key, dim)
    pulled = np.einsum("bij,bqj->bqi", score, tokens)  # W x_i
    covariance = np.einsum("bqk,bqkd,bke->bqde", weights, centred, tokens, optimize=True)
    direct = np.einsum("bqkd,bqe->bqkde", centred, pulled) + np.eye(tokens.shape[-1])
    blocks = weights[..., None, None] * direct
    same = np.arange(tokens.shape[1])
    blocks[:, same, same] += covariance @ score[:, None]
    return blocks, covariance
