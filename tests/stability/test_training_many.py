"""Several seeds, sweeps and their summary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import stability
from stability.errors import UserError
from stability.experiments import PAPER_SEEDS, Job, read_sweep, run_jobs, seeds_jobs
from stability.files import write_table
from stability.summary import summary, to_text

SWEEP = """
task = "even-pairs"
attention = ["full", "topk:3"]
seeds = [1, 2]
epochs = 1
width = 8
hidden = 8
[task_options]
length = 8
train = 40
held_out = 20
[grid]
blocks = [1, 2]
"""


def test_sweep_is_resumable(tmp_path: Path) -> None:
    (tmp_path / "ablation.toml").write_text(SWEEP)
    jobs = read_sweep(tmp_path / "ablation.toml")
    assert len(jobs) == 8
    assert jobs[2].folder == tmp_path / "ablation" / "full-blocks2" / "seed1"
    assert set(run_jobs(jobs[:3]).values()) == {"finished"}
    before = (jobs[0].folder / "history.parquet").stat().st_mtime_ns
    with ThreadPoolExecutor(2) as pool:
        outcomes = run_jobs(jobs, pool)
    assert list(outcomes.values()).count("done before") == 3
    assert list(outcomes.values()).count("finished") == 5
    assert (jobs[0].folder / "history.parquet").stat().st_mtime_ns == before
    table = summary(tmp_path)
    assert len(table) == 4
    assert set(table.settings.str.contains("blocks=1")) == {True, False}
    assert (table.runs == 2).all()
    alone = stability.train("even-pairs", "topk:3", seed=2, task_options=jobs[0].task_options, **jobs[7].settings)
    again = pd.read_parquet(jobs[7].folder / "history.parquet")
    assert again.train_loss.equals(alone.history.train_loss)


def test_one_that_fails_or_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    small = {"epochs": 1, "width": 8, "hidden": 8, "blocks": 1}
    options = {"length": 6, "train": 30, "held_out": 10}
    jobs = seeds_jobs("parity", "full", [1, 2], tmp_path / "good", options, small)
    wild = Job(
        tmp_path / "wild", "parity", "full", 1, options, {**small, "learning_rate": 1e30, "clip": 1e30, "epochs": 4}
    )
    wrong = Job(tmp_path / "wrong", "parity", "full", 1, options, {**small, "heads": 3})
    outcomes = run_jobs([wrong, wild, *jobs])
    assert outcomes[wrong.folder].startswith("failed: Expected `width`")
    assert outcomes[wild.folder] == "diverged"
    assert [outcomes[job.folder] for job in jobs] == ["finished", "finished"]
    assert summary(tmp_path / "wild").diverged.tolist() == [1]


def _run(folder: Path, attention: str, seed: int, reached: int | None) -> None:
    options = {"length": 6, "train": 30, "held_out": 10}
    run = stability.train(
        "parity", attention, seed=seed, out=folder, task_options=options, epochs=1, width=8, hidden=8, blocks=1
    )
    history = pd.concat([run.history] * 12, ignore_index=True)
    history["epoch"] = range(1, 13)
    history["train_accuracy"] = [float(reached is not None and epoch >= reached) for epoch in history.epoch]
    history["heldout_accuracy"] = np.linspace(0.9, 0.6, 12)
    write_table(history, folder / "history.parquet")


def test_summary_numbers(tmp_path: Path) -> None:
    for seed, (full, own) in enumerate([(10, 2), (12, 4), (8, None)]):
        _run(tmp_path / f"full{seed}", "full", seed, full)
        _run(tmp_path / f"top{seed}", "topk:2", seed, own)
    table = summary(tmp_path).set_index("attention")
    assert table.loc["full", "epochs_mean"] == 10
    assert table.loc["full", "epochs_std"] == pytest.approx(np.std([10, 12, 8]))
    assert table.loc["topk:2", "never"] == 1
    assert table.loc["topk:2", "speedup"] == pytest.approx(10 / 3)
    assert 8 / 4 <= table.loc["topk:2", "speedup_low"] < 10 / 3 < table.loc["topk:2", "speedup_high"] <= 12 / 2
    assert table.loc["full", "speedup"] == 1
    assert table.loc["full", "best_heldout_mean"] == pytest.approx(0.9)
    assert table.loc["full", "final_heldout_mean"] == pytest.approx(0.6)
    assert "topk:2" in to_text(summary(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = [", "TOML"),
        ("seeds = 3", "Expected `task`"),
        ('task = "parity"\nlearning_rat = 1', "Expected settings among"),
        ('task = "parity"\n[grid]\nblocks = 3', "lists"),
        ('task = "parity"\nattention = "topp"', "known"),
    ],
)
def test_bad_sweeps(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sweep(tmp_path / "bad.toml")


def test_paper_seeds_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('task = "parity"\nseeds = 3')
    assert [job.seed for job in read_sweep(tmp_path / "a.toml")] == list(PAPER_SEEDS[:3])
    with pytest.raises(UserError, match="run folders"):
        summary(tmp_path)
