"""Lipschitz estimates from samples: each is a lower bound of the true constant, and says how many samples it rests on.

`estimate` reads them off a traced surface by distance from the centre, `sample` takes pairs in many random directions.
"""

from stability.lipschitz.neighbours import estimate
from stability.lipschitz.sample import sample

__all__ = ["estimate", "sample"]
