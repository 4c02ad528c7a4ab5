"""`stability bounds` as functions: tables in, verdicts and figures out."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from stability.commands.bounds import explain, run_bounds, run_regions
from stability.files import read_table, write_table

STATISTICS = ["min", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max"]


def table(kind, selection, values):
    rows = [
        {
            "model": "m",
            "module": "",
            "layer": None,
            "head": None,
            "scope": "model",
            "selection": selection,
            "kind": kind,
        }
        | {"metric": metric}
        | dict.fromkeys(STATISTICS, value)
        for metric, value in values.items()
    ]
    return pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"})


FULL = table("full", "full", {"dispersion": 8.61})
SPARSE = table("heavy-hitter", "topk:5", {"dispersion": 3.51, "separation": 0.016, "sink_ratio": 0.2})


@pytest.fixture
def tables(tmp_path):
    mixed = pd.concat([FULL, SPARSE], ignore_index=True)  # as `stability probe` with two selections writes them
    return write_table(FULL, tmp_path / "full.parquet"), write_table(mixed, tmp_path / "run" / "topk.parquet")


def test_verdicts_are_written_beside_the_second_table(tables):
    verdicts = run_bounds(*tables)
    target = tables[1].parent / "verdicts.parquet"
    assert verdicts.attrs["path"] == str(target)
    written = read_table(target)
    assert list(written.left_hand_side) == list(verdicts.left_hand_side)
    assert verdicts.left_hand_side[0] == pytest.approx(0.970289, abs=1e-6)
    assert written.attrs["provenance"]["full_table"] == str(tables[0])
    with pytest.raises(ValueError, match="--force"):
        run_bounds(*tables)
    run_bounds(*tables, force=True)


def test_out_may_be_a_file_or_a_folder(tables, tmp_path):
    assert run_bounds(*tables, tmp_path / "v.parquet").attrs["path"] == str(tmp_path / "v.parquet")
    assert run_bounds(*tables, tmp_path / "new").attrs["path"] == str(tmp_path / "new" / "verdicts.parquet")


def test_bad_tables_leave_nothing_behind(tables, tmp_path):
    bad = write_table(FULL.drop(columns="p75"), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="lacks the columns p75"):
        run_bounds(bad, tables[1])
    with pytest.raises(ValueError, match="no such file"):
        run_bounds(tmp_path / "none.parquet", tables[1])
    (tmp_path / "half.parquet").write_bytes(tables[0].read_bytes()[:100])
    with pytest.raises(ValueError, match="can't be read"):
        run_bounds(tables[0], tmp_path / "half.parquet")
    assert not (tables[1].parent / "verdicts.parquet").exists()


def test_region_figures(tmp_path):
    written = run_regions(tmp_path / "figures")
    assert {path.name for path in written} == {
        f"region-{n}.{k}" for n in ("parameter", "input") for k in ("png", "pdf")
    }
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert all(path.stat().st_size > 5000 for path in written)
    assert set(written) == set((tmp_path / "figures").iterdir())
    with pytest.raises(ValueError, match="--force"):
        run_regions(tmp_path / "figures")


def test_explanations():
    text = explain("theorem-5")
    assert "Assumes:" in text
    assert r"\Delta_h" in text
    assert "Theorem 5; reconstructed" in text
    assert "kept by at most beta k queries" in text
    with pytest.raises(ValueError, match="theorem-5"):
        explain("theorem-55")


def test_the_module_loads_without_torch_and_theory_is_quick():
    code = (
        "import sys, time; start = time.perf_counter(); import theory; theory.full, theory.softmax, theory.comparison;"
        "from stability.commands import bounds; assert 'torch' not in sys.modules; print(time.perf_counter() - start)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 3  # half a second on a quiet machine
