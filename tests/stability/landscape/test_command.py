"""The command's function on a run folder: everything is written, resumed, refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import stability
from stability import landscape
from stability.commands.landscape import run_landscape
from stability.errors import UserError
from stability.files import read_table


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    options = {"length": 8, "train": 64, "held_out": 16}
    stability.train("even-pairs", "topk:3", out=folder, epochs=1, blocks=1, width=8, hidden=8, task_options=options)
    return folder


def test_writes_everything_once(run: Path) -> None:
    traced = run_landscape(run, steps=5, csv=True)
    assert all(path.exists() for path in traced.paths)
    assert {path.name for path in traced.paths} >= {
        *("surface.parquet", "directions.safetensors", "lipschitz.parquet", "surface.csv"),
        *("contour.png", "contour.pdf", "heat-map.png", "surface-3d.png", "lipschitz.png"),
    }
    surface = landscape.Surface.read(run / "surface.parquet")
    checkpoint = stability.open(run)
    tokens, labels = (torch.cat(part) for part in zip(*checkpoint.batches(labels=True), strict=True))
    with torch.no_grad():
        own = F.cross_entropy(checkpoint.model(tokens), labels).item()
    assert surface.grid()[2, 2] == pytest.approx(own, abs=1e-6)
    assert "accuracy" in surface.functions
    assert read_table(run / "lipschitz.parquet", ["function", "unit", "radius", "count"]).equals(traced.estimates)
    with pytest.raises(UserError, match="exists already"):
        run_landscape(run, steps=5)
    again = run_landscape(run, steps=3, force=True, figures=False)
    assert len(again.surface.frame) == 9


def test_stopped_run_goes_on(run: Path, tmp_path: Path) -> None:
    first = run_landscape(run, steps=5, chunk=3, out=tmp_path, figures=False)
    log = tmp_path / "surface.log"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:4]) + lines[4][:10])
    (tmp_path / "lipschitz.parquet").unlink()
    second = run_landscape(run, steps=5, chunk=3, out=tmp_path, figures=False)
    assert second.surface.frame.drop(columns="seconds").equals(first.surface.frame.drop(columns="seconds"))
    (tmp_path / "lipschitz.parquet").unlink()
    with pytest.raises(UserError, match="different directions"):
        run_landscape(run, steps=5, chunk=3, seed=1, out=tmp_path)


@pytest.mark.parametrize("kind", ["filter", "layer", "unscaled", "hessian"])
def test_kinds_of_directions(run: Path, tmp_path: Path, kind: str) -> None:
    traced = run_landscape(run, steps=3, directions=kind, limit=16, out=tmp_path / "first", figures=False)
    assert traced.surface.metadata["directions"] == ("hessian" if kind == "hessian" else "gaussian")
    saved = tmp_path / "first" / "directions.safetensors"
    again = run_landscape(run, steps=3, reuse=saved, limit=16, out=tmp_path / "second", figures=False)
    assert again.surface.frame.drop(columns="seconds").equals(traced.surface.frame.drop(columns="seconds"))


def test_line_checkpoints_and_biases(run: Path, tmp_path: Path) -> None:
    traced = run_landscape(run, steps=5, line=True, gradient_norm=True, keep_biases=False, out=tmp_path / "line")
    assert "gradient_norm" in traced.surface.functions
    assert (tmp_path / "line" / "figures" / "line.png").exists()
    with pytest.raises(UserError, match="one or two further checkpoints"):
        run_landscape(run, directions="checkpoints", out=tmp_path / "a")
    with pytest.raises(UserError, match="at least two directions"):
        run_landscape(run, directions="pca", to=[run], out=tmp_path / "b")
    with pytest.raises(UserError, match="Expected directions among"):
        run_landscape(run, directions="sideways", out=tmp_path / "c")
    with pytest.raises(UserError, match="no such file or folder"):
        run_landscape(run / "nowhere", out=tmp_path / "d")


def test_importing_the_command_loads_no_torch() -> None:
    code = "import sys, stability.commands.landscape; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
