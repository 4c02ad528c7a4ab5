"""A traced slice: a tidy table with one row per point, and what it is a picture of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from stability.errors import UserError
from stability.files import read_table, write_table

COORDINATES = ("x", "y", "distance", "relative_distance")


@dataclass(frozen=True)
class Surface:
    r"""Values of one or more functions over a slice of parameter space.

    Attributes:
        frame: columns x, y (grid units: multiples of the directions), distance (:math:`\|\Delta\Theta\|_2`),
            relative_distance (:math:`\|\Delta\Theta\|_2 / \|\Theta\|_2`), one column per function ("loss" first),
            seconds. On a line y is 0.
        metadata: directions' kind, scaling, seed, norms and inner product; norm of the parameters; steps and radius;
            values at the centre; how many points are not finite, by function; how it was evaluated. All
            JSON-serialisable.
    """

    frame: pd.DataFrame
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the evaluated functions."""
        return tuple(name for name in self.frame.columns if name not in (*COORDINATES, "seconds"))

    @property
    def x(self) -> Float64[np.ndarray, " columns"]:
        """Coordinates along the first direction, ascending."""
        return np.unique(self.frame["x"].to_numpy(float))

    @property
    def y(self) -> Float64[np.ndarray, " rows"]:
        """Coordinates along the second direction, ascending."""
        return np.unique(self.frame["y"].to_numpy(float))

    @property
    def center(self) -> dict[str, float]:
        """Values at the trained point, also where it is not on the grid; empty if they are not known."""
        if known := self.metadata.get("center"):
            return dict(known)
        row = self.frame[(self.frame["x"] == 0) & (self.frame["y"] == 0)]
        return {name: float(row[name].iloc[0]) for name in self.functions} if len(row) else {}

    @property
    def non_finite(self) -> dict[str, int]:
        """Number of points at which each function is NaN or infinite."""
        return {name: int((~np.isfinite(self.frame[name].to_numpy(float))).sum()) for name in self.functions}

    @property
    def direction_norms(self) -> tuple[float, ...]:
        """Parameter distance of one grid unit along each direction; empty if not known."""
        return tuple(self.metadata.get("direction_norms") or ())

    def grid(self, function: str = "loss") -> Float64[np.ndarray, "rows columns"]:
        """Values as an array: rows along y, columns along x, both ascending.

        Args:
            function: a column of the table, also "distance".

        Returns:
            The array; points that are not in the table are NaN.

        Raises:
            UserError: if there is no such column.
        """
        if function not in self.frame.columns:
            raise UserError(f"Expected one of {', '.join(self.functions)}, but got {function!r}.")
        x, y = self.x, self.y
        values = np.full((len(y), len(x)), np.nan)
        rows, columns = np.searchsorted(y, self.frame["y"]), np.searchsorted(x, self.frame["x"])
        values[rows, columns] = self.frame[function].to_numpy(float)
        return values

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Save as Parquet, atomically, with the metadata inside.

        Args:
            path: the file to write.

        Returns:
            The path.
        """
        return write_table(self.frame, path, seed=self.metadata.get("seed"), surface=dict(self.metadata))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Surface:
        """Load what `write` saved.

        Args:
            path: the file.

        Returns:
            The surface.

        Raises:
            UserError: if the file is missing or is not a surface.
        """
        frame = read_table(path, (*COORDINATES, "seconds"))
        record = frame.attrs.pop("provenance")
        if not set(frame.columns) - {*COORDINATES, "seconds"}:
            raise UserError(f"Expected a surface with at least one function at {path}, but it has coordinates only.")
        return cls(frame, record.get("surface", {}))
