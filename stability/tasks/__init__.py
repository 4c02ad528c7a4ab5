"""Training tasks, each with a registered name, a dataclass of options, and seeded data."""

from stability.tasks.arithmetic import ModularArithmetic, SolveEquation
from stability.tasks.base import IGNORED, Data, Examples, Task, known, make, task
from stability.tasks.bits import CycleNavigation, EvenPairs, MissingDuplicates, Parity
from stability.tasks.language import Language
from stability.tasks.listops import ListOps
from stability.tasks.recall import Recall
from stability.tasks.stack import StackManipulation

__all__ = [
    "IGNORED",
    "CycleNavigation",
    "Data",
    "EvenPairs",
    "Examples",
    "Language",
    "ListOps",
    "MissingDuplicates",
    "ModularArithmetic",
    "Parity",
    "Recall",
    "SolveEquation",
    "StackManipulation",
    "Task",
    "known",
    "make",
    "task",
]
