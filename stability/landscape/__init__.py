"""Loss landscapes: slices through parameter space, with honest units.

`slice` traces a plane around a model, `line` a line, `between` the segment between two models; each returns a
`Surface`.
"""

from stability.landscape.directions import Directions
from stability.landscape.objective import accuracy
from stability.landscape.surface import Surface
from stability.landscape.trace import between, line, slice

__all__ = ["Directions", "Surface", "accuracy", "between", "line", "slice"]
