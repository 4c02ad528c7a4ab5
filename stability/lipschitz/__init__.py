"""Lipschitz estimates from samples: each is a lower bound of the true constant, and says how many samples it rests on.

`estimate` reads them off a traced surface, by distance from the centre.
"""

from stability.lipschitz.neighbours import estimate

__all__ = ["estimate"]
