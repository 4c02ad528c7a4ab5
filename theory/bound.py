"""One bound: a formula with its assumptions and its source, that can be read, rendered and evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

from theory.evaluate import log_value
from theory.symbols import QUANTITIES, Expression, check

PAPER = "Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025 (arXiv 2506.14095)"
RECONSTRUCTED = (
    "reconstructed: derived anew, agrees with every ratio in Appendix F.4; the common prefactor was not checked "
    "against the printed theorem"
)


@dataclass(frozen=True, eq=False)
class Bound:
    """An upper bound as one object: symbols and numbers come from the same sympy expression.

    Args:
        name: a short name such as `theorem-5-input`.
        bounded: LaTeX of what is bounded.
        expression: the bound, a sympy expression in the symbols of `theory.symbols`.
        assumptions: when it holds, in words.
        source: where it comes from.
        letters: LaTeX of quantities whose letter differs here from the general one.
        defaults: quantities that equal another one where they are omitted, such as `keys` and `length` for full
            attention.
    """

    name: str
    bounded: str
    expression: Expression
    assumptions: str
    source: str
    letters: Mapping[str, str] = field(default_factory=dict, repr=False)
    defaults: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def reconstructed(self) -> bool:
        """Whether this is a form of the paper that was derived anew, not read."""
        return RECONSTRUCTED in self.source

    @property
    def symbols(self) -> tuple[Expression, ...]:
        """The symbols of the expression; their names are the keywords of `value` and `log`."""
        used = {str(symbol) for symbol in self.expression.free_symbols}
        return tuple(quantity.symbol for name, quantity in QUANTITIES.items() if name in used)

    @property
    def log_expression(self) -> Expression:
        """The logarithm of the bound, a sympy expression with products taken apart."""
        return sympy.expand_log(sympy.log(self.expression), force=True)

    @cached_property
    def latex(self) -> str:
        """The bound as LaTeX, without what it bounds."""
        names = {quantity.symbol: self.letters.get(name, quantity.letter) for name, quantity in QUANTITIES.items()}
        return str(sympy.latex(self.expression, symbol_names=names))

    def log(self, **arguments: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the natural logarithm of the bound.

        Args:
            **arguments: numbers or arrays by the names of the symbols; they broadcast. Quantities that the bound does
                not depend on are ignored, so that one dictionary serves many bounds.

        Returns:
            The logarithm in float64; +inf where there is no finite bound (a separation of 0), NaN where an argument
                is.

        Raises:
            TypeError: if an argument is missing or is not a quantity.
        """
        arrays = check(arguments)
        arrays = {name: arrays[other] for name, other in self.defaults.items() if other in arrays} | arrays
        missing = [str(symbol) for symbol in self.symbols if str(symbol) not in arrays]
        if missing:
            raise TypeError(
                f"Expected {self.name} to get {', '.join(map(str, self.symbols))}, but got no {', '.join(missing)}."
            )
        log = log_value(self.expression, arrays)
        used = [arrays[str(symbol)] for symbol in self.symbols]
        # Min and Max would let a constant win over an unknown argument.
        unknown = np.any(np.broadcast_arrays(*(np.isnan(array) for array in used)), axis=0) if used else False
        return np.where(unknown, np.nan, log)[()]

    def value(self, **arguments: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the bound.

        Args:
            **arguments: see `log`.

        Returns:
            The bound in float64; +inf where it exceeds the largest float or is not finite.
        """
        with np.errstate(over="ignore"):
            return np.exp(self.log(**arguments))

    __call__ = value

    def explain(self) -> str:
        """Describe the bound in a few lines of text.

        Returns:
            Name, formula in LaTeX, symbols, assumptions and source.
        """
        used = [QUANTITIES[str(symbol)] for symbol in self.symbols]
        letters = [f"    {self.letters.get(one.name, one.letter)}  `{one.name}`: {one.meaning}" for one in used]
        return "\n".join(
            [
                f"{self.name}",
                f"  ${self.bounded} \\le {self.latex}$",
                *(["  with"] if letters else []),
                *letters,
                f"  Assumes: {self.assumptions}",
                f"  Source: {self.source}",
            ]
        )
