"""Attempts to break the bounds: searches that maximise measured / bound for each inequality.

    attempts = theory.falsify.attack_all(seed=0)
    print(theory.falsify.report())           # where each published form fails
    theory.falsify.counterexample()          # the published form of Theorem 3, exceeded by 11.9 %

A ratio above 1 refutes a bound. No ratio below 1 proves one; the proofs are in docs/theory.md.
"""

from __future__ import annotations

from theory.falsify.cases import counterexample, problems
from theory.falsify.search import Attempt, Problem, attack, attack_all, summary

__all__ = ["Attempt", "Problem", "attack", "attack_all", "counterexample", "problems", "report", "summary"]


def report(*, seed: int = 0) -> str:
    """Run all searches and the counterexample, and say how far they got.

    Args:
        seed: of the random inputs.

    Returns:
        One line a bound. The published forms are reconstructed, so a failure may be the reconstruction's.
    """
    return summary([*attack_all(seed=seed), *counterexample()])
