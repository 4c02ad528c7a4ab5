"""What a folder of runs shows: epochs to 95 %, accuracies, and the speed-up over full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from stability.errors import UserError
from stability.files import read_table
from stability.runs import COLUMNS, CONFIG, HISTORY, epochs_to
from stability.settings import RunConfig, configure, read_config

THRESHOLD = 0.95
RESAMPLES = 10_000


def summary(folder: str | Path, *, threshold: float = THRESHOLD, seed: int = 0) -> pd.DataFrame:
    """Summarise all run folders below a folder.

    Standard deviations are population ones. The speed-up is the mean number of epochs of full attention divided by
    that of the row, both over the runs that reached the threshold, with a 95 % bootstrap interval (runs resampled
    within each side); it is missing where either side has no such run, its interval where either has only one.

    Args:
        folder: holds run folders, at any depth.
        threshold: the training accuracy to reach.
        seed: of the bootstrap.

    Returns:
        One row for each task, attention and other settings: runs, epochs to the threshold (counted from 1; mean, std,
        never), diverged runs, best and final held-out accuracy (mean, std), majority_accuracy, speedup, speedup_low,
        speedup_high.

    Raises:
        UserError: if there are no run folders.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(Path(folder).rglob(CONFIG)):
        if not (path.parent / HISTORY).is_file() or any(part.startswith(".") for part in path.parent.parts[-2:]):
            continue
        config, tables = read_config(path)
        history = read_table(path.parent / HISTORY, COLUMNS)
        result = tables.get("result", {})
        groups.setdefault((config.task.name, config.model.attention, settings_words(config)), []).append(
            {
                "epochs": epochs_to(history, threshold),
                "diverged": result.get("outcome") == "diverged",
                "best": history["heldout_accuracy"].max(),
                "final": history["heldout_accuracy"].iloc[-1],
                "majority": result.get("majority_accuracy_heldout", np.nan),
            }
        )
    if not groups:
        raise UserError(f"Expected run folders in {folder}, but there are none.")
    rng = np.random.default_rng(seed)
    rows = [_row(key, runs, groups.get((key[0], "full", key[2]), []), rng) for key, runs in groups.items()]
    return pd.DataFrame(rows)


def settings_words(config: RunConfig) -> str:
    """What of a configuration differs from the task's published settings, attention and seed aside.

    Args:
        config: the configuration.

    Returns:
        Such as `blocks=6, learning_rate=0.2`; empty where nothing differs.
    """
    usual = configure(config.task, config.model.attention, config.seed, None, {}).tables()
    plain_task = type(config.task)
    words = []
    for name, table in config.tables().items():
        if name == "task_options":
            defaults = {f: getattr(plain_task, f, None) for f in table}
            words += [f"{key}={value}" for key, value in table.items() if value != defaults[key]]
        elif isinstance(table, dict):
            ignored = {"tokens", "classes", "padding", "readout", "attention", "epochs", "stop_at"}
            words += [f"{k}={v}" for k, v in table.items() if k not in ignored and v != usual[name].get(k)]
    return ", ".join(words)


def _row(
    key: tuple[str, str, str], runs: list[dict[str, Any]], full: list[dict[str, Any]], rng: np.random.Generator
) -> dict[str, Any]:
    epochs, reference = (
        np.array([r["epochs"] for r in side if r["epochs"] is not None], float) for side in (runs, full)
    )
    row: dict[str, Any] = dict(zip(("task", "attention", "settings"), key, strict=True))
    row |= {
        "runs": len(runs),
        "epochs_mean": epochs.mean() if epochs.size else np.nan,
        "epochs_std": epochs.std() if epochs.size else np.nan,
        "never": len(runs) - epochs.size,
        "diverged": sum(r["diverged"] for r in runs),
    }
    for name in ("best", "final"):
        values = np.array([r[name] for r in runs], float)
        row |= {f"{name}_heldout_mean": values.mean(), f"{name}_heldout_std": values.std()}
    row["majority_accuracy"] = float(np.mean([r["majority"] for r in runs]))
    row |= dict(zip(("speedup", "speedup_low", "speedup_high"), _speedup(reference, epochs, rng), strict=True))
    return row


def _speedup(full: np.ndarray, own: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    if not full.size or not own.size:
        return np.nan, np.nan, np.nan
    ratio = float(full.mean() / own.mean())
    if full.size < 2 or own.size < 2:
        return ratio, np.nan, np.nan
    means = [side[rng.integers(0, side.size, (RESAMPLES, side.size))].mean(1) for side in (full, own)]
    low, high = np.quantile(means[0] / means[1], [0.025, 0.975])
    return ratio, float(low), float(high)


def to_text(table: pd.DataFrame) -> str:
    """A summary for the terminal.

    Args:
        table: the summary.

    Returns:
        Lines of columns.
    """
    return str(table.to_string(index=False, float_format=lambda x: f"{x:.3g}", na_rep="-"))
