"""Loss landscapes: slices through parameter space, with honest units.

`slice` traces a plane around a model, `line` a line, `between` the segment between two models; each returns a
`Surface`. Directions come from `gaussian`, `hessian`, `principal` (the checkpoints of a run) or `towards` (given
checkpoints).
"""

from stability.landscape.directions import Directions, gaussian, principal, towards
from stability.landscape.hessian import hessian
from stability.landscape.interchange import read_csv, write_csv
from stability.landscape.objective import accuracy
from stability.landscape.surface import Surface
from stability.landscape.trace import between, line, slice

__all__ = [
    "Directions",
    "Surface",
    "accuracy",
    "between",
    "gaussian",
    "hessian",
    "line",
    "principal",
    "read_csv",
    "slice",
    "towards",
    "write_csv",
]
