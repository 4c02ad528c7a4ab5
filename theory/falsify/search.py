"""The searches: random points, structured points, and gradient ascent from the best of both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from theory.bound import Bound

Array = NDArray[np.float64]
_STEP = 1e-6


class Problem(ABC):
    """A family of inputs, described by a vector each, on which inequalities can be measured."""

    name: str
    size: int
    """Numbers that describe one input."""

    @cached_property
    @abstractmethod
    def bounds(self) -> dict[str, Bound]:
        """The bounds that this problem tries to break, by the name of what is measured."""

    @abstractmethod
    def measure(self, points: Array) -> tuple[dict[str, Array], Mapping[str, Array]]:
        """Measure the left-hand sides, and the quantities that the bounds depend on.

        Args:
            points: inputs, shape (batch, size).

        Returns:
            Left-hand sides by the names in `bounds`, shape (batch,), 0 where there is nothing to measure, and
            quantities by the names of their symbols.
        """

    def structured(self) -> Array:
        """Hand-made inputs that are known or thought to be bad.

        Returns:
            Inputs, shape (any, size).
        """
        return np.zeros((0, self.size))

    def log_ratio(self, target: str, points: Array) -> Array:
        """Evaluate log(measured / bound).

        Args:
            target: a name in `bounds`.
            points: inputs, shape (batch, size).

        Returns:
            One number an input, -inf where there is nothing to measure or no finite bound.
        """
        measured, quantities = self.measure(points)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(measured[target]) - self.bounds[target].log(**quantities)
        return np.where(np.isnan(ratio), -np.inf, ratio)


@dataclass(frozen=True)
class Attempt:
    """The worst that one search found for one bound.

    Args:
        bound: the bound.
        problem: the family of inputs.
        search: `random`, `structured` or `ascent`.
        ratio: measured / bound; above 1 refutes the bound.
        point: the input, as the vector of the problem.
    """

    bound: Bound
    problem: str
    search: str
    ratio: float
    point: Array


def attack(
    problem: Problem, target: str, *, seed: int, trials: int = 300, steps: int = 25, starts: int = 3
) -> list[Attempt]:
    """Try to break one bound on one problem.

    Args:
        problem: the family of inputs.
        target: a name in `problem.bounds`.
        seed: of the random inputs.
        trials: random inputs.
        steps: of gradient ascent.
        starts: how many of the best inputs to climb from.

    Returns:
        The worst input of each search.
    """
    generator = np.random.default_rng(seed)
    scales = np.exp(generator.uniform(-3, 2, (trials, 1)))
    found = {"random": scales * generator.standard_normal((trials, problem.size)), "structured": problem.structured()}
    attempts, tried = [], []
    for search, points in found.items():
        if not len(points):
            continue
        ratios = problem.log_ratio(target, points)
        attempts.append(_attempt(problem, target, search, points, ratios))
        tried.append((points, ratios))
    points, ratios = np.concatenate([one for one, _ in tried]), np.concatenate([other for _, other in tried])
    best = np.argsort(-ratios, kind="stable")[:starts]
    points, ratios = _climb(problem, target, points[best], steps)
    return [*attempts, _attempt(problem, target, "ascent", points, ratios)]


def attack_all(
    problems: Sequence[Problem] | None = None, *, seed: int = 0, trials: int = 300, steps: int = 25
) -> list[Attempt]:
    """Try to break every bound.

    Args:
        problems: the families of inputs; all of `cases.problems()` where omitted.
        seed: of the random inputs.
        trials: random inputs a bound.
        steps: of gradient ascent.

    Returns:
        The worst input of each search for each bound on each problem.
    """
    from theory.falsify import cases

    chosen = cases.problems() if problems is None else problems
    return [
        attempt
        for problem in chosen
        for target in problem.bounds
        for attempt in attack(problem, target, seed=seed, trials=trials, steps=steps)
    ]


def summary(attempts: Sequence[Attempt]) -> str:
    """Say for each bound how far the searches got.

    Args:
        attempts: what `attack_all` returned.

    Returns:
        One line a bound, the published forms first, each with the largest ratio and where it was found.
    """
    worst: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.bound.name not in worst or attempt.ratio > worst[attempt.bound.name].ratio:
            worst[attempt.bound.name] = attempt
    lines = []
    for attempt in sorted(worst.values(), key=lambda one: (not one.bound.reconstructed, -one.ratio)):
        # Ratios of bounds that are reached carry rounding.
        verdict = "exceeded" if attempt.ratio > 1 + 1e-9 else "not exceeded"
        kind = "reconstructed" if attempt.bound.reconstructed else "rigorous"
        lines.append(
            f"{attempt.bound.name} ({kind}): {verdict}, measured / bound at most {attempt.ratio:.4g} "
            f"({attempt.search}, {attempt.problem})"
        )
    return "\n".join(lines)


def _attempt(problem: Problem, target: str, search: str, points: Array, ratios: Array) -> Attempt:
    worst = int(ratios.argmax())
    return Attempt(problem.bounds[target], problem.name, search, float(np.exp(ratios[worst])), points[worst].copy())


def _climb(problem: Problem, target: str, points: Array, steps: int) -> tuple[Array, Array]:
    # Ascent on log(measured / bound): central differences, all in one batch, then the best of several step lengths.
    points, count = points.copy(), len(points)
    ratios = problem.log_ratio(target, points)
    moves = np.concatenate([np.eye(problem.size), -np.eye(problem.size)])  # (2 size, size)
    lengths = np.array([1e-3, 1e-2, 0.1, 0.5])
    for _ in range(steps):
        scale = np.maximum(np.abs(points).max(1), 1e-3)[:, None]  # (count, 1)
        around = points[:, None] + _STEP * scale[..., None] * moves  # (count, 2 size, size)
        values = problem.log_ratio(target, around.reshape(-1, problem.size)).reshape(count, 2, -1)
        with np.errstate(invalid="ignore"):
            slope = np.nan_to_num(values[:, 0] - values[:, 1], posinf=0, neginf=0)  # (count, size)
        norm = np.linalg.norm(slope, axis=1, keepdims=True)
        direction = np.divide(slope, norm, out=np.zeros_like(slope), where=norm > 0)
        ahead = points[:, None] + lengths[:, None] * scale[..., None] * direction[:, None]  # (count, lengths, size)
        gains = problem.log_ratio(target, ahead.reshape(-1, problem.size)).reshape(count, -1)
        pick = gains.argmax(1)
        better = gains[np.arange(count), pick] > ratios
        if not better.any():
            break
        points[better] = ahead[better, pick[better]]
        ratios[better] = gains[better, pick[better]]
    return points, ratios
