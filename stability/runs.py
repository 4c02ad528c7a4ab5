"""Run folders: config.toml, model.safetensors (last), best.safetensors, state.safetensors, history.parquet.

A run lives in a hidden folder beside its place until it is complete, and is then moved there in one step. The hidden
folder always holds the last complete epoch, from which an interrupted run can go on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stability.errors import UserError
from stability.files import atomic_write, provenance, read_table, refuse_existing, write_table
from stability.model import Encoder
from stability.settings import RunConfig, read_config, to_toml

CONFIG, WEIGHTS, BEST, STATE, HISTORY = (
    "config.toml",
    "model.safetensors",
    "best.safetensors",
    "state.safetensors",
    "history.parquet",
)
COLUMNS = (
    "epoch", "train_loss", "train_accuracy", "heldout_loss", "heldout_accuracy", "seconds", "gradient_norm",
    "learning_rate",
)  # fmt: skip

Outcome = Literal["finished", "stopped early", "diverged"]


@dataclass(frozen=True, eq=False)
class Run:
    """A training run that has ended.

    Attributes:
        config: what the run is a function of.
        history: one row an epoch, counted from 1: losses (nats) and accuracies over the whole training and held-out
            sets after the epoch, without dropout; seconds that the epoch took with its evaluations; mean gradient norm
            of its steps before clipping; learning rate.
        model: with its last weights, in evaluation mode.
        outcome: whether all epochs were run, the accuracy to stop at was reached, or a loss was not finite.
        record: further facts, such as the accuracy of always giving the commonest label.
        folder: the run folder; None if nothing was written.
    """

    config: RunConfig
    history: pd.DataFrame
    model: Encoder
    outcome: Outcome
    record: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def epochs_to(self, accuracy: float) -> int | None:
        """The first epoch, counted from 1, after which the training accuracy is at least `accuracy`.

        Args:
            accuracy: between 0 and 1.

        Returns:
            The epoch; None if it was never reached.
        """
        return epochs_to(self.history, accuracy)


def epochs_to(history: pd.DataFrame, accuracy: float) -> int | None:
    """The first epoch, counted from 1, after which the training accuracy is at least `accuracy`.

    Args:
        history: a run's history.
        accuracy: between 0 and 1.

    Returns:
        The epoch; None if it was never reached.
    """
    reached = history.loc[history["train_accuracy"] >= accuracy, "epoch"]
    return int(reached.iloc[0]) if len(reached) else None


class Workshop:
    """The hidden folder in which a run is made.

    Args:
        target: where the finished run is to be.
        force: replace what is there.
        resume: go on from what is there, finished or not.

    Raises:
        UserError: if something is there and neither `force` nor `resume` is given, or the place can't be written to.
    """

    def __init__(self, target: Path, *, force: bool = False, resume: bool = False) -> None:
        self.target, self.folder = target, target.with_name(f".{target.name}.part")
        if not resume:
            refuse_existing(target, force=force)
        try:
            if not resume:
                shutil.rmtree(self.folder, ignore_errors=True)
            elif not self.folder.exists() and target.exists():
                shutil.copytree(target, self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".writable").touch()
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise UserError(
                f"Expected a writable folder for {target}, but got {error.strerror}; choose another place."
            ) from error

    def begun(self, config: RunConfig) -> tuple[dict[str, Tensor], pd.DataFrame] | None:
        """What an earlier part of this run left.

        Args:
            config: of the run that is to go on.

        Returns:
            Its state and history after its last complete epoch; None if there is nothing yet.

        Raises:
            UserError: if what is there belongs to another configuration, or is damaged.
        """
        if not (self.folder / STATE).is_file():
            return None
        earlier, _ = read_config(self.folder / CONFIG)
        mine, theirs = config.tables(), earlier.tables()
        for tables in (mine, theirs):
            for name in ("epochs", "stop_at"):
                tables["training"].pop(name, None)
        if mine != theirs:
            differing = [key for key in mine if mine[key] != theirs[key]]
            raise UserError(
                f"Expected to go on with the run in {self.target} under the same settings, but {', '.join(differing)} "
                "differ; use the same ones, or --force to start anew."
            )
        history = read_table(self.folder / HISTORY, COLUMNS)
        state = load_weights(self.folder / STATE)
        done = int(state.pop("epoch"))
        return state, history[history["epoch"] <= done].reset_index(drop=True)

    def save(self, config: RunConfig, history: pd.DataFrame, state: Mapping[str, Tensor]) -> None:
        """Write down a complete epoch; the state goes last, so that the history never lags behind it.

        Args:
            config: of the run.
            history: up to this epoch.
            state: everything that the next epoch depends on.
        """
        if not (self.folder / STATE).exists() or not (self.folder / CONFIG).exists():
            self.write_config(config.tables())
        write_table(history, self.folder / HISTORY, seed=config.seed)
        save_weights(state, self.folder / STATE)

    def write_config(self, tables: Mapping[str, Any]) -> None:
        """Write config.toml.

        Args:
            tables: its contents.
        """
        with atomic_write(self.folder / CONFIG) as temporary:
            temporary.write_text(to_toml(tables), encoding="utf-8")

    def finish(self, run: Run) -> None:
        """Add the outcome and move the run to its place.

        Args:
            run: the run.
        """
        write_table(run.history, self.folder / HISTORY, seed=run.config.seed)
        save_weights(run.model.state_dict(), self.folder / WEIGHTS)
        result = {"outcome": run.outcome, "epochs": len(run.history), **run.record}
        made = provenance()
        self.write_config({**run.config.tables(), "result": result, "provenance": made})
        old = self.target.with_name(f".{self.target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.replace(old)
        self.folder.replace(self.target)
        if old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove the hidden folder if no epoch was completed in it."""
        if not (self.folder / STATE).is_file():
            shutil.rmtree(self.folder, ignore_errors=True)


def save_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, atomically.

    Args:
        tensors: by name.
        path: the file.
    """
    with atomic_write(path) as temporary:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read tensors from a safetensors file.

    Args:
        path: the file.

    Returns:
        Tensors by name.

    Raises:
        UserError: if the file is missing or damaged.
    """
    if not Path(path).is_file():
        raise UserError(f"Expected weights at {path}, but there is no such file.")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"Expected {path} to be a safetensors file, but it is damaged or cut short ({error})."
        ) from error
