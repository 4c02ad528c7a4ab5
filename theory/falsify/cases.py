"""The problems that are attacked, and the counterexample that random search hardly ever finds."""

from __future__ import annotations

import numpy as np

from theory.falsify.attention import Change, Derivative, Kind
from theory.falsify.search import Attempt, Problem
from theory.falsify.softmax import Pair, Point, SetPair


def problems() -> tuple[Problem, ...]:
    """All problems, small enough for a test.

    Returns:
        Softmax alone, then whole layers under the three kinds of selection.
    """
    changes: tuple[tuple[Kind, int], ...] = (("full", 0), ("regular", 2), ("heavy-hitter", 2))
    return (
        *(Point(keys) for keys in (2, 3, 6)),
        *(Pair(keys) for keys in (2, 3, 6)),
        *(SetPair(length, keys) for length, keys in ((4, 1), (6, 2), (6, 3))),
        Derivative(8, 2, "full", 8),
        Derivative(6, 2, "regular", 3),
        Derivative(6, 2, "heavy-hitter", 2),
        *(Change(5, 2, kind, keys, "input") for kind, keys in changes),
        *(Change(4, 2, kind, keys, "parameter") for kind, keys in changes),
    )


def counterexample(*, length: int = 40, strength: float = 100.0) -> tuple[Attempt, Attempt]:
    r"""Exceed the published form of Theorem 3's input stability (reconstructed) by 11.9 %.

    In the plane, a quarter of the tokens lies at (1, 0) and the rest at (-1, 0), W exchanges the coordinates with
    strength :math:`\Gamma`, V = I. All logits are 0, so the dispersion is 0; a token of the first group moves along
    (0, 1). The true constant tends to :math:`2.25\,\Gamma`, the published form to :math:`2\,\Gamma`.

    Args:
        length: tokens, a multiple of 4.
        strength: :math:`\Gamma`.

    Returns:
        The attempts on the published and on the sharp form.
    """
    problem = Derivative(length, 2, "full", length)
    tokens = np.zeros((length, 2))
    tokens[:, 0] = np.where(np.arange(length) < length // 4, 1.0, -1.0)
    point = np.concatenate([tokens.ravel(), strength * np.array([0.0, 1.0, 1.0, 0.0])])
    published, sharp = (problem.log_ratio(name, point[None])[0] for name in ("input", "input sharp"))
    return (
        Attempt(problem.bounds["input"], problem.name, "counterexample", float(np.exp(published)), point),
        Attempt(problem.bounds["input sharp"], problem.name, "counterexample", float(np.exp(sharp)), point),
    )
