"""Lipschitz estimates against closed forms."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from stability import landscape, lipschitz
from stability.errors import UserError
from stability.landscape.surface import Surface


class Bowl(nn.Module):
    """Loss = curvature |theta - origin|^2 / 2 + slope . theta."""

    def __init__(self, curvature: float = 0.0, slope: float = 0.0, size: int = 5) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.arange(1.0, size + 1, dtype=torch.float64))
        self.register_buffer("origin", self.theta.detach().clone())
        self.register_buffer("gradient", slope * torch.ones(size, dtype=torch.float64) / size**0.5)
        self.curvature = curvature

    def forward(self) -> Tensor:
        return self.curvature * (self.theta - self.origin).square().sum() / 2 + self.gradient @ self.theta


def loss(model: nn.Module) -> Tensor:
    return model()


def rows(table: pd.DataFrame, unit: str) -> pd.DataFrame:
    return table[table["unit"] == unit].set_index("radius")


def test_quadratic_has_its_exact_constant_at_every_distance() -> None:
    surface = landscape.slice(Bowl(curvature=3.0), loss, steps=21, seed=1)
    norm = surface.direction_norms[0]
    table = lipschitz.estimate(surface)
    spacing = 0.1 * norm
    for number, radius in enumerate(np.arange(1, 11) / 10, start=1):
        row = rows(table, "parameter").iloc[number - 1]
        # Along an axis through the centre, between (r - h) and r, the slope is a (r - h / 2): the largest within r.
        assert row["max"] == pytest.approx(3.0 * (radius * norm - spacing / 2), rel=1e-9)
        assert rows(table, "parameter").index[number - 1] == pytest.approx(radius * norm)
        assert rows(table, "grid").iloc[number - 1]["max"] == pytest.approx(row["max"] * norm, rel=1e-9)


def test_percentiles_and_counts_equal_a_slow_loop() -> None:
    surface = landscape.slice(Bowl(curvature=1.0, slope=2.0), loss, steps=7, seed=3)
    values = {(row.x, row.y): row.loss for row in surface.frame.itertuples()}
    along = surface.x
    for window in ("disc", "square"):
        table = lipschitz.estimate(surface, radii=[1.0, 2 / 3], window=window)
        for radius in (2 / 3, 1.0):
            slopes = []
            for i, a in enumerate(along):
                for j, b in enumerate(along):
                    for k, m in ((i + 1, j), (i, j + 1)):
                        if k < 7 and m < 7:
                            ends = [(a, b), (along[k], along[m])]
                            sizes = [max(abs(p), abs(q)) if window == "square" else np.hypot(p, q) for p, q in ends]
                            if max(sizes) <= radius + 1e-12:
                                slopes.append(abs(values[ends[1]] - values[ends[0]]) / (along[1] - along[0]))
            row = rows(table, "grid").loc[radius]
            assert row["count"] == len(slopes)
            assert row["undefined"] == 0
            expected = [*np.percentile(slopes, [50, 75, 95, 99]), max(slopes)]
            assert row[["p50", "p75", "p95", "p99", "max"]].tolist() == pytest.approx(expected, rel=1e-9)
    assert rows(lipschitz.estimate(surface, window="square"), "grid").loc[1.0, "count"] == 2 * 6 * 7


def test_linear_model_has_one_constant() -> None:
    model = Bowl(slope=4.0)
    drawn = landscape.gaussian(model, seed=2, count=1)
    table = lipschitz.estimate(landscape.line(model, loss, steps=11, seed=2))
    expected = abs(float(model.gradient @ drawn.x["theta"])) / drawn.norms[0]
    parameter = rows(table, "parameter")
    assert parameter[["p50", "p99", "max"]].to_numpy().ravel().tolist() == pytest.approx([expected] * 15, rel=1e-9)
    assert parameter["count"].tolist() == [2, 4, 6, 8, 10]
    assert set(table["bound"]) == {"lower bound"}
    surface = landscape.slice(model, loss, steps=3, directions=landscape.Directions(*[{"theta": model.gradient}] * 2))
    assert rows(lipschitz.estimate(surface), "parameter")["max"].iloc[0] == pytest.approx(4.0, rel=1e-12)


def test_not_finite_pairs_are_counted_and_left_out() -> None:
    surface = landscape.slice(Bowl(slope=1.0), loss, steps=5)
    frame = surface.frame.copy()
    frame.loc[frame["x"] == 1, "loss"] = np.nan
    frame.loc[(frame["x"] == -1) & (frame["y"] == -1), "loss"] = np.inf
    table = lipschitz.estimate(Surface(frame, surface.metadata), window="square")
    last = rows(table, "grid").iloc[-1]
    assert (last["count"], last["undefined"]) == (40 - 9 - 2, 9 + 2)
    assert np.isfinite(last["max"])
    nothing = Surface(frame.assign(loss=np.nan), surface.metadata)
    empty = rows(lipschitz.estimate(nothing, window="square"), "grid").iloc[-1]
    assert empty["count"] == 0
    assert np.isnan(empty["max"])


def test_surface_without_norms_has_grid_units_only() -> None:
    surface = landscape.slice(Bowl(slope=1.0), loss, steps=3)
    table = lipschitz.estimate(Surface(surface.frame))
    assert set(table["unit"]) == {"grid"}


def test_sample_of_linear_and_quadratic_models() -> None:
    flat = lipschitz.sample(Bowl(slope=4.0, size=3), loss, distances=[0.0, 1.0], directions=200, step=0.1, seed=5)
    assert flat["max"].between(3.5, 4.0 + 1e-9).all()  # |g . v| of 200 directions in 3 dimensions
    assert flat["count"].tolist() == [200, 200]
    assert set(flat["bound"]) == {"lower bound"}
    bowl = lipschitz.sample(Bowl(curvature=2.0, size=3), loss, distances=[1.0, 5.0], directions=300, step=0.01, seed=5)
    for distance, largest in zip(bowl["distance"], bowl["max"], strict=True):
        assert 0.8 * 2 * distance < largest <= 2 * (distance + 0.005) + 1e-9
    again = lipschitz.sample(Bowl(curvature=2.0, size=3), loss, distances=[1.0, 5.0], directions=300, step=0.01, seed=5)
    pd.testing.assert_frame_equal(bowl, again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distances": [-1.0]}, "`distances` of at least 0"),
        ({"distances": []}, "`distances` of at least 0"),
        ({"distances": [1.0], "directions": 0}, "`directions` to be at least 1"),
        ({"distances": [1.0], "step": 0.0}, "`step` to be a positive"),
    ],
)
def test_sample_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lipschitz.sample(Bowl(), loss, **arguments)  # type: ignore[arg-type]


def test_estimate_refuses() -> None:
    surface = landscape.slice(Bowl(), loss, steps=3)
    with pytest.raises(UserError, match="positive radii"):
        lipschitz.estimate(surface, radii=[0.0])
    with pytest.raises(UserError, match="disc or square"):
        lipschitz.estimate(surface, window="ring")
    with pytest.raises(UserError, match="Expected one of"):
        lipschitz.estimate(surface, functions=["f1"])
