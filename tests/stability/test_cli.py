"""The command line as its users meet it: in a process of its own, with their mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import stability
from stability.demo import language_model
from stability.files import read_table


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stability.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    small = {"epochs": 2, "blocks": 2, "width": 8, "hidden": 8}
    options = {"train": 100, "held_out": 50, "length": 12}
    for name, attention in (("full", "full"), ("top", "topk:3")):
        stability.train("even-pairs", attention, seed=1, out=folder / name, task_options=options, **small)
    return folder


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"stability {stability.__version__}\n")


def test_the_chain_of_commands_from_files_alone(pair: Path) -> None:
    for name, attention in (("full", "full"), ("top", "topk:3")):
        done = run("probe", pair / name, "--select", attention)
        assert done.returncode == 0, done.stderr
        assert str(pair / name / "measurements.parquet") in done.stdout
        done = run("landscape", pair / name, "--steps", 3, "--no-figures")
        assert done.returncode == 0, done.stderr
        assert str(pair / name / "surface.parquet") in done.stdout
    tables = (pair / "full" / "measurements.parquet", pair / "top" / "measurements.parquet")
    done = run("bounds", *tables)
    assert done.returncode == 0, done.stderr
    verdicts = read_table(pair / "top" / "verdicts.parquet")
    assert set(verdicts["percentile"]) == {75, 90, 95, 100}
    assert set(verdicts["condition"]) == {"parameter", "input"}
    done = run("report", pair / "full", pair / "top")
    assert done.returncode == 0, done.stderr
    page = (pair / "full" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6  # learning curves, two dispersions, two slices, Lipschitz curves
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is fetched
    again = run("report", pair / "full", pair / "top")
    assert again.returncode == 2
    assert "--force" in again.stderr


def tables_of(folder: Path) -> tuple[Path, Path]:
    whole, poor = folder / "whole.parquet", folder / "poor.parquet"
    pd.DataFrame({"scope": ["model"], "metric": ["dispersion"]}).to_parquet(poor)
    pd.DataFrame({"a": [1.0]}).to_parquet(whole)
    return whole, poor


def mistakes(folder: Path) -> dict[str, tuple[list[object], str]]:
    (folder / "empty").mkdir()
    (folder / "empty.txt").write_text("\n \n")
    (folder / "latin.txt").write_bytes("Caf\xe9 au lait".encode("latin-1"))
    (folder / "file").write_text("")
    whole, poor = tables_of(folder)
    half = folder / "half"
    stability.train("parity", seed=1, out=half, epochs=1, blocks=1, width=4, hidden=4, task_options={"train": 9})
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    model = language_model()
    return {
        "missing checkpoint": (["probe", folder / "none"], "no such file or folder"),
        "folder without config": (["probe", folder / "empty"], "config"),
        "half-written weights": (["probe", half], "damaged or cut short"),
        "k below 1": (["probe", half, "--select", "topk:0"], "at least 1"),
        "unknown selection": (["probe", half, "--select", "tpok:5"], "topk"),
        "unknown task": (["train", "odd-pears", "--out", folder / "x"], "even-pairs"),
        "unknown attention": (["train", "parity", "--attention", "bandd:3", "--out", folder / "x"], "banded"),
        "empty text": (["probe", model, "--text", folder / "empty.txt", "--out", folder / "x"], "empty"),
        "text in another encoding": (["probe", model, "--text", folder / "latin.txt", "--out", folder / "x"], "UTF-8"),
        "table without columns": (["bounds", whole, poor, "--out", folder / "x"], "lacks the columns"),
        "no table": (["bounds", whole, folder / "none.parquet", "--out", folder / "x"], "no such file"),
        "unwritable folder": (["train", "parity", "--out", folder / "file" / "x"], "writable folder"),
        "report of nothing": (["report", folder / "empty"], "found none"),
        "one table only": (["bounds", whole], "Expected two tables"),
    }


def test_a_mistake_ends_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    for what, (words, part) in mistakes(tmp_path).items():
        before = sorted(tmp_path.rglob("*"))
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 2, (what, done.stdout, done.stderr)
        assert part in done.stderr, (what, done.stderr)
        assert "Traceback" not in done.stderr, (what, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, (what, done.stderr)
        assert sorted(tmp_path.rglob("*")) == before, what


@pytest.mark.slow
def test_the_demo_writes_everything_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = run("demo", "--out", out, "--epochs", 1, "--steps", 3)
    assert done.returncode == 0, done.stderr
    for name in ("full", "top-5"):
        for part in ("config.toml", "model.safetensors", "history.parquet", "measurements.parquet", "surface.parquet"):
            assert (out / name / part).is_file(), part
    figures = ["learning-curves", "dispersion-full", "dispersion-minilm", "loss-slice-top-5", "lipschitz"]
    assert all((out / "figures" / f"{name}.{kind}").is_file() for name in figures for kind in ("png", "pdf"))
    heads = read_table(out / "minilm" / "measurements.parquet").query("scope == 'head' and metric == 'dispersion'")
    assert len(heads) == 2 * 6 * 12
    assert str(out / "report.html") in done.stdout
    again = run("demo", "--out", out, "--epochs", 1, "--steps", 3)
    assert again.returncode == 2
    assert "--force" in again.stderr
