"""The paper's CSV: points land where their coordinates say, and their own arithmetic reads ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import Encoder, pairs

from stability import landscape
from stability.errors import UserError
from stability.landscape import grid
from stability.landscape.surface import Surface


def surface(steps: int = 5) -> Surface:
    functions = {"accuracy": landscape.accuracy}
    return landscape.slice(Encoder(), (F.cross_entropy, pairs()), steps=steps, functions=functions)


@pytest.mark.parametrize("transpose", [False, True])
def test_round_trip(tmp_path: Path, transpose: bool) -> None:
    ours = surface()
    path = landscape.write_csv(ours, tmp_path / "surface.csv", transpose=transpose)
    assert path.read_text().splitlines()[0] == "idx,xval,yval,loss,acc,time"
    norms = (ours.direction_norms[0], ours.direction_norms[1])
    again = landscape.read_csv(
        path, transpose=transpose, direction_norms=norms, parameter_norm=ours.metadata["parameter_norm"]
    )
    pd.testing.assert_frame_equal(again.frame, ours.frame, rtol=1e-12, atol=1e-7)
    np.testing.assert_allclose(again.x, ours.x, rtol=0, atol=1e-14)
    assert again.x[2] == 0
    assert again.center["loss"] == pytest.approx(ours.center["loss"], rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 210), st.sampled_from([0.1, 0.7, 1.0, 3.0]))
def test_truncating_readers_find_every_cell(steps: int, radius: float) -> None:
    along = grid.axis(steps, radius)
    frame = pd.DataFrame({"x": along, "y": 0.0, "loss": 1.0, "seconds": 0.0})
    from stability.landscape.interchange import _lifted

    written = _lifted(frame["x"].to_numpy())
    # As their script does: (value - smallest) / step, cut off, with the step of linspace.
    for smallest in (-radius, written.min()):
        cells = ((written - smallest) / (2 * radius / (steps - 1))).astype(int)
        np.testing.assert_array_equal(cells, np.arange(steps))


def test_file_of_theirs_is_placed_by_coordinates_not_by_idx(tmp_path: Path) -> None:
    # Their grid: linspace in float32, written in a random order, with an index of its own.
    along = torch.linspace(-1, 1, 21).numpy().astype(float)
    rows = [(x, y) for x in along for y in along]
    order = np.random.default_rng(0).permutation(len(rows))
    theirs = pd.DataFrame(
        {
            "idx": np.arange(len(rows)),
            "xval": [rows[n][0] for n in order],
            "yval": [rows[n][1] for n in order],
            "loss": [10 * rows[n][0] + rows[n][1] for n in order],
            "acc": 0.5,
            "time": 0.1,
        }
    )
    theirs.to_csv(tmp_path / "theirs.csv", index=False)
    read = landscape.read_csv(tmp_path / "theirs.csv")
    assert read.grid().shape == (21, 21)
    np.testing.assert_allclose(read.grid(), 10 * read.x[None, :] + read.y[:, None], atol=1e-5)
    assert read.x[10] == 0
    assert read.center["loss"] == pytest.approx(0, abs=1e-6)
    assert read.frame["distance"].isna().all()
    assert read.direction_norms == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "but got xval, yval"),
        ("idx,xval,yval,loss,acc,time\n", "no row"),
        ("idx,xval,yval,loss,acc,time\n0,0,0,1,1,1\n1,0,0,1,1,1\n", "each point once"),
        ("idx,xval,yval,loss,acc,time\n0,zero,0,1,1,1\n", "Expected numbers"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        landscape.read_csv(tmp_path / "file.csv")
    with pytest.raises(UserError, match="can't be read"):
        landscape.read_csv(tmp_path / "missing.csv")
