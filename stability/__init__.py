"""The experiments on softmax stability: models, tasks, training, loss landscapes, Lipschitz estimates, reports.

Names are imported when they are first used, so that `import stability` and the command line's help stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stability import landscape as landscape
    from stability import lipschitz as lipschitz
    from stability.checkpoints import open as open
    from stability.training import train as train

__version__ = "0.1.0"

__all__ = ["__version__", "landscape", "lipschitz", "open", "train"]

_HOME = {"open": ("stability.checkpoints", "open"), "train": ("stability.training", "train")}
_MODULES = frozenset({"landscape", "lipschitz"})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        return getattr(importlib.import_module(module), attribute)
    if name in _MODULES:
        return importlib.import_module(f"stability.{name}")
    raise AttributeError(f"module 'stability' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
