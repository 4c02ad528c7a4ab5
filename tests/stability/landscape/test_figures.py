"""Figures: what is on the axes, and that nothing hides a NaN."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib
import numpy as np
import pandas as pd
import pytest

from stability import lipschitz
from stability.errors import UserError
from stability.landscape import figures
from stability.landscape.surface import Surface

matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


def bowl(hole: bool = False, scale: float = 1.0) -> Surface:
    along = np.linspace(-1, 1, 11)
    x, y = (part.ravel() for part in np.meshgrid(along, along))
    loss = scale * (0.01 + x**2 + 2 * y**2)
    if hole:
        loss[(x > 0.5) & (y > 0.5)] = np.nan
    distance = 5 * np.hypot(x, y)
    frame = pd.DataFrame({"x": x, "y": y, "distance": distance, "relative_distance": distance / 10, "loss": loss})
    return Surface(frame.assign(seconds=0.0), {"direction_norms": [5.0, 5.0], "name": "bowl"})


def test_contour_has_log_levels_labels_and_units() -> None:
    ax = figures.contour(bowl())
    assert "1 unit" in ax.get_xlabel()
    assert "5" in ax.get_ylabel()
    assert "0.01" in ax.get_title()
    assert len(ax.texts) > 3
    levels = figures.contour_levels(bowl().grid().ravel())
    ratios = levels[1:] / levels[:-1]
    assert ratios == pytest.approx(np.full(len(ratios), ratios.mean()), rel=0.1)
    flat = figures.contour_levels(np.array([1.0, 1.1]))
    assert np.diff(flat) == pytest.approx(np.full(len(flat) - 1, np.diff(flat).mean()), rel=0.7)
    assert figures.contour_levels(np.array([2.0, 2.0])).tolist() == [2.0]
    assert figures.contour_levels(np.array([-1.0, 0.0, 3.0])).min() > -1


@pytest.mark.parametrize("draw", [figures.contour, figures.heat_map, figures.surface_3d])
def test_not_finite_points_are_counted_in_their_own_colour(draw: object) -> None:
    ax = draw(bowl(hole=True))  # type: ignore[operator]
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["not finite (9 points)"]
    assert draw(bowl()).get_legend() is None  # type: ignore[operator]
    colour = matplotlib.colors.to_rgba(figures.NOT_FINITE)
    drawn = [tuple(row) for c in ax.collections for row in np.atleast_2d(c.get_facecolor()) if len(row) == 4]
    if draw is not figures.surface_3d:
        ax.figure.canvas.draw()
        drawn = [tuple(row) for c in ax.collections for row in np.atleast_2d(c.get_facecolor()) if len(row) == 4]
    assert any(np.allclose(row[:3], colour[:3]) for row in drawn)


def test_several_models_in_one_picture() -> None:
    surfaces = {"full": bowl(), "top-5": bowl(scale=3.0)}
    axes = figures.contours(surfaces)
    assert [ax.get_title().splitlines()[0] for ax in axes] == ["full", "top-5"]
    ax = figures.lipschitz_curves({name: lipschitz.estimate(surface) for name, surface in surfaces.items()})
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[0] == "full, 50th percentile"
    assert labels[-1] == "top-5, maximum"
    assert "lower bound" in ax.get_ylabel()
    assert "distance" in ax.get_xlabel()
    lines = ax.get_lines()
    assert np.asarray(lines[3].get_ydata()) == pytest.approx(3 * np.asarray(lines[0].get_ydata()))
    with pytest.raises(UserError, match="the table has none"):
        figures.lipschitz_curves({"full": lipschitz.estimate(bowl())}, function="accuracy")
    with pytest.raises(UserError, match="at least one surface"):
        figures.contours({})


def test_difference_is_point_by_point() -> None:
    ax = figures.difference(bowl(scale=3.0), bowl())
    shown = np.asarray(ax.collections[0].get_array()).reshape(11, 11)
    np.testing.assert_allclose(shown, 2 * bowl().grid())
    other = Surface(bowl().frame.assign(x=lambda frame: 2 * frame["x"]))
    with pytest.raises(UserError, match="the same grid"):
        figures.difference(bowl(), other)


def test_axes_given_are_the_axes_returned() -> None:
    _, ax = plt.subplots()
    assert figures.heat_map(bowl(), ax=ax) is ax
    frame = bowl().frame.query("y == 0").reset_index(drop=True)
    frame.loc[3, "loss"] = np.inf
    ax = figures.profile({"a": Surface(frame, {"kind": "between"})})
    assert "second" in ax.get_xlabel()
    assert "a: not finite (1 points)" in [text.get_text() for text in ax.get_legend().get_texts()]
