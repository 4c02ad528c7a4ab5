"""Training tasks, each with a registered name, a dataclass of options, and seeded data."""

from stability.tasks.base import IGNORED, Data, Examples, Task, known, make, task
from stability.tasks.bits import CycleNavigation, EvenPairs, MissingDuplicates, Parity

__all__ = [
    "IGNORED",
    "CycleNavigation",
    "Data",
    "EvenPairs",
    "Examples",
    "MissingDuplicates",
    "Parity",
    "Task",
    "known",
    "make",
    "task",
]
