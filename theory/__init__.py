"""What the bounds on softmax stability say, in symbols (sympy) and in numbers (numpy, log domain).

    theory.heavy_hitter.input_stability.expression        # sympy
    theory.heavy_hitter.input_stability.log(dispersion=1.0, separation=0.1, ...)
    theory.softmax.full_sharp(dispersion=1.0, keys=5)
    theory.compare(full=table, heavy_hitter=table)        # Appendix F.4 on measurement tables

Modules are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory import attention as attention
    from theory import catalogue as catalogue
    from theory import comparison as comparison
    from theory import falsify as falsify
    from theory import learning as learning
    from theory import network as network
    from theory import plots as plots
    from theory import softmax as softmax
    from theory.attention import full as full
    from theory.attention import heavy_hitter as heavy_hitter
    from theory.attention import regular as regular
    from theory.bound import Bound as Bound
    from theory.catalogue import explain as explain
    from theory.verdicts import compare as compare

_NAMES = {
    "explain": "catalogue",
    "Bound": "bound",
    "full": "attention",
    "regular": "attention",
    "heavy_hitter": "attention",
    "compare": "verdicts",
}
_MODULES = (
    "attention",
    "bound",
    "catalogue",
    "comparison",
    "falsify",
    "learning",
    "network",
    "plots",
    "softmax",
    "symbols",
    "verdicts",
)

__all__ = ["Bound", "compare", "explain", "full", "heavy_hitter", "regular"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"theory.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"theory.{name}")
    raise AttributeError(f"module 'theory' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
