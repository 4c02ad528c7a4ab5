"""Attempts to break the bounds: searches that maximise measured / bound for each inequality.

    attempts = theory.falsify.attack_all(seed=0)
    theory.falsify.counterexample()          # the published form of Theorem 3, exceeded by 11.9 %

A ratio above 1 refutes a bound. No ratio below 1 proves one; the proofs are in docs/theory.md.
"""

from __future__ import annotations

from theory.falsify.cases import counterexample, problems
from theory.falsify.search import Attempt, Problem, attack, attack_all

__all__ = ["Attempt", "Problem", "attack", "attack_all", "counterexample", "problems"]
