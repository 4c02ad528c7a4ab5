"""All bounds and conditions by name, and what there is to say about each."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache

from theory import attention, comparison, learning, network, softmax
from theory.bound import Bound


def bounds() -> tuple[Bound, ...]:
    """All bounds of the package.

    Returns:
        The bound objects; their names are distinct.
    """
    theorems = tuple(bound for theorem in attention.THEOREMS for bound in theorem.all_bounds)
    ratios = tuple(condition.ratio for condition in comparison.CONDITIONS)
    return (
        *softmax.BOUNDS,
        *theorems,
        attention.masked,
        attention.masked_sets,
        attention.yudin,
        *ratios,
        *network.BOUNDS,
        *learning.BOUNDS,
    )


@cache
def _explanations() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {bound.name: bound.explain for bound in bounds()}
    found |= {theorem.name: theorem.explain for theorem in attention.THEOREMS}
    found |= {condition.name: condition.explain for condition in comparison.CONDITIONS}
    found |= {condition.boundary.name: condition.boundary.explain for condition in comparison.CONDITIONS}
    return found


def names() -> list[str]:
    """The names that `explain` knows.

    Returns:
        The names, sorted.
    """
    return sorted(_explanations())


def explain(name: str) -> str:
    """Explain a theorem, a bound or a condition.

    Args:
        name: such as `theorem-5`, `softmax-full-sharp` or `f4-parameter`; case and underscores don't matter.

    Returns:
        Its formula in LaTeX, its symbols, assumptions and source.

    Raises:
        ValueError: if the name isn't known; the message lists near names and all known ones.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = _explanations()
    if key not in found:
        near = difflib.get_close_matches(key, found, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"Expected the name of a theorem, bound or condition, but got {name!r}.{hint} Known: {', '.join(names())}."
        )
    return found[key]()
