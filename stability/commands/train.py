"""`stability train`: train the paper's encoder on a task and write a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from stability.experiments import Job
    from stability.runs import Run


def run_train(
    task: str,
    attention: str = "full",
    seed: int = 1,
    out: Path | None = None,
    force: bool = False,
    resume: bool = False,
    epochs: int | None = None,
    stop_at: float | None = None,
    task_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train one model.

    Args:
        task: name of the task.
        attention: short name of the selection.
        seed: of data, initial weights, batch order and dropout.
        out: the run folder; `runs/TASK-ATTENTION-seedN` where omitted.
        force: replace an existing run folder.
        resume: go on with an interrupted run, or with a finished one for more epochs.
        epochs: passes over the training set; the paper's number for the task where omitted.
        stop_at: training accuracy at which to stop early.
        task_options: fields of the task's dataclass; values may be text.
        **settings: further fields of `EncoderConfig` and `TrainingConfig`; those that are None keep their defaults.

    Returns:
        The run; `run.folder` says where it is.
    """
    from stability.training import train

    given = {"epochs": epochs, "stop_at": stop_at, **settings}
    return train(
        task,
        attention,
        seed=seed,
        out=default_folder(task, attention, seed) if out is None else out,
        force=force,
        resume=resume,
        task_options=task_options,
        **{name: value for name, value in given.items() if value is not None},
    )


def run_seeds(
    task: str,
    attention: str = "full",
    seeds: int = 10,
    seed: int = 1,
    out: Path | None = None,
    workers: int = 1,
    task_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[Path, str]:
    """Train the same model with several seeds, each in a run folder of its own; done ones are left alone.

    Args:
        task: name of the task.
        attention: short name of the selection.
        seeds: how many.
        seed: the first one; the others follow it.
        out: the folder of run folders; `runs/TASK-ATTENTION` where omitted.
        workers: processes, each with one thread.
        task_options: fields of the task's dataclass.
        **settings: as for `run_train`.

    Returns:
        The outcome of each run folder.
    """
    from stability.experiments import seeds_jobs

    one = default_folder(task, attention, seed)
    folder = one.with_name(one.name.rpartition("-")[0])
    given = {name: value for name, value in settings.items() if value is not None}
    numbers = range(seed, seed + seeds)
    return _run_all(seeds_jobs(task, attention, numbers, folder if out is None else out, task_options, given), workers)


def run_sweep(file: Path, workers: int = 1) -> dict[Path, str]:
    """Do the runs of a sweep file that are not done.

    Args:
        file: see `stability.experiments.read_sweep`.
        workers: processes, each with one thread.

    Returns:
        The outcome of each run folder.
    """
    from stability.experiments import read_sweep

    return _run_all(read_sweep(file), workers)


def _run_all(jobs: list[Job], workers: int) -> dict[Path, str]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    from stability.experiments import run_jobs

    if workers < 1:
        raise UserError(f"Expected at least one worker, but got {workers}.")
    if workers == 1:
        return run_jobs(jobs)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return run_jobs(jobs, pool)


def run_summary(folder: Path, out: Path | None = None, force: bool = False) -> pd.DataFrame:
    """Summarise the run folders below a folder.

    Args:
        folder: the folder.
        out: a Parquet file to write the table to; none where omitted.
        force: replace an existing file.

    Returns:
        The table; `stability.summary.to_text` makes lines of it.
    """
    from stability.files import refuse_existing, write_table
    from stability.summary import summary

    if out is not None:
        refuse_existing(out, force=force)
    table = summary(folder)
    if out is not None:
        write_table(table, out, folder=str(folder))
    return table


def default_folder(task: str, attention: str, seed: int) -> Path:
    """Where a run goes if nothing else is said.

    Args:
        task: name of the task.
        attention: short name of the selection.
        seed: the run's seed.

    Returns:
        `runs/TASK-ATTENTION-seedN`, with a hyphen for each character that is awkward in a file name.
    """
    safe = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in attention)
    return Path("runs") / f"{task}-{safe}-seed{seed}"


def task_options(words: list[str]) -> dict[str, str]:
    """Read options of a task as the command line gives them.

    Args:
        words: each `NAME=VALUE`.

    Returns:
        Values by name.

    Raises:
        UserError: if a word has no equals sign.
    """
    pairs = [word.partition("=") for word in words]
    for (name, sign, _), word in zip(pairs, words, strict=True):
        if not sign or not name:
            raise UserError(f"Expected a task option of the form NAME=VALUE, but got {word!r}.")
    return {name: value for name, _, value in pairs}


def words(run: Run) -> list[str]:
    """What came of a run, in a few lines.

    Args:
        run: the run.

    Returns:
        Lines for the terminal.
    """
    last, config, reached = run.history.iloc[-1], run.config, run.epochs_to(0.95)
    first = "95 % training accuracy " + ("was not reached" if reached is None else f"at epoch {reached}")
    lines = [
        f"{config.task.name} with {config.model.attention} attention, seed {config.seed}: {run.outcome} after "
        f"{len(run.history)} epochs (counted from 1); {first}.",
        f"Training accuracy {last.train_accuracy:.1%}, held out {last.heldout_accuracy:.1%}; always giving the "
        f"commonest label would reach {run.record['majority_accuracy_heldout']:.1%}.",
    ]
    return lines if run.folder is None else [*lines, f"Run folder: {run.folder}"]
