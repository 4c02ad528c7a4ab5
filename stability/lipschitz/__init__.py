"""Lipschitz estimates from samples: each is a lower bound of the true constant, and says how many samples it rests on.

`estimate` reads them off a traced surface by distance from the centre, `sample` takes pairs in many random directions,
`local_input` finds the constant of the output with respect to the embedded input at given sequences, and
`beside_theory` sets it beside composed bounds.
"""

from stability.lipschitz.inputs import beside_theory, local_input
from stability.lipschitz.neighbours import estimate
from stability.lipschitz.sample import sample

__all__ = ["beside_theory", "estimate", "local_input", "sample"]
