"""Many runs at once: several seeds, sweeps from a TOML file, and the summary of what came out."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stability.errors import UserError
from stability.runs import CONFIG, Run
from stability.settings import configure, read_config
from stability.training import train

PAPER_SEEDS = (
    153476998, 235510766, 205084180, 129959864, 149896109, 140439608, 145017219, 162518970, 245293503, 152674004,
)  # fmt: skip
"""Seeds of the paper's ten repetitions."""


@dataclass(frozen=True)
class Job:
    """One run to be done.

    Attributes:
        folder: its run folder.
        task: name of the task.
        attention: short name of the selection.
        seed: the run's seed.
        task_options: fields of the task.
        settings: fields of the model's and the optimiser's configuration.
    """

    folder: Path
    task: str
    attention: str
    seed: int
    task_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def done(self) -> bool:
        """Whether the run folder holds this very run.

        Returns:
            True if nothing is left to do.

        Raises:
            UserError: if the folder holds another run.
        """
        if not (self.folder / CONFIG).is_file():
            return False
        wanted = configure(self.task, self.attention, self.seed, self.task_options, self.settings)  # type: ignore[arg-type]
        found, _ = read_config(self.folder / CONFIG)
        if found != wanted:
            raise UserError(f"Expected the run folder {self.folder} to be of this sweep, but its settings are others.")
        return True


def run_job(job: Job, progress: bool | None = None, threads: int | None = None) -> str:
    """Do one run, or go on with it where it was interrupted.

    Args:
        job: what to do.
        progress: show a progress bar.
        threads: for torch; as it is where omitted.

    Returns:
        The outcome.
    """
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    run: Run = train(
        job.task,
        job.attention,
        seed=job.seed,
        out=job.folder,
        resume=True,
        progress=progress,
        task_options=job.task_options,
        **job.settings,
    )
    return run.outcome


def run_jobs(jobs: Sequence[Job], executor: Executor | None = None) -> dict[Path, str]:
    """Do those of several runs that are not done; one that fails or diverges does not stop the others.

    Args:
        jobs: what to do.
        executor: where to do it, such as a process pool; one after the other in this process where omitted.

    Returns:
        For each run folder the outcome, `done before`, or the message of its error.
    """
    outcomes = {job.folder: "done before" for job in jobs if job.done()}
    waiting = [job for job in jobs if job.folder not in outcomes]
    if executor is None:
        for job in waiting:
            try:
                outcomes[job.folder] = run_job(job)
            except (ValueError, OSError) as error:
                outcomes[job.folder] = f"failed: {error}"
        return outcomes
    futures = {executor.submit(run_job, job, False, 1): job for job in waiting}
    for future in tqdm(as_completed(futures), total=len(futures), desc="runs", unit="run", disable=None):
        failure = future.exception()
        outcomes[futures[future].folder] = future.result() if failure is None else f"failed: {failure}"
    return outcomes


def seeds_jobs(
    task: str,
    attention: str,
    seeds: Iterable[int],
    out: Path,
    task_options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Job]:
    """The same run with several seeds, each in its folder `seedN` below `out`.

    Args:
        task: name of the task.
        attention: short name of the selection.
        seeds: the seeds.
        out: the folder of run folders.
        task_options: fields of the task.
        settings: further settings.

    Returns:
        The runs to be done.
    """
    return [Job(out / f"seed{seed}", task, attention, seed, task_options or {}, settings or {}) for seed in seeds]


def read_sweep(path: Path) -> list[Job]:
    """Read a sweep: every combination of the listed attentions, seeds and settings.

    The file holds `task`, `attention` (a name or a list), `seeds` (a list, or a number of the paper's seeds), `out`
    (a folder, from the file's own), any settings of `stability.train`, a table `task_options`, and a table `grid` whose
    lists are crossed.

    Args:
        path: the TOML file.

    Returns:
        The runs to be done, in the order of the file.

    Raises:
        UserError: if the file is missing, is not TOML, lacks something, or a setting is wrong.
    """
    if not path.is_file():
        raise UserError(f"Expected a sweep file at {path}, but there is no such file.")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"Expected {path} to be TOML, but it can't be read ({error}).") from error
    if "task" not in tables:
        raise UserError(f"Expected `task` in the sweep {path}, but it has {', '.join(tables) or 'nothing'}.")
    task, options, grid = tables.pop("task"), tables.pop("task_options", {}), tables.pop("grid", {})
    attentions, seeds = tables.pop("attention", "full"), tables.pop("seeds", [1])
    out = path.parent / tables.pop("out", path.stem)
    attentions = [attentions] if isinstance(attentions, str) else attentions
    seeds = PAPER_SEEDS[:seeds] if isinstance(seeds, int) else seeds
    if not attentions or not seeds or any(not isinstance(values, list) or not values for values in grid.values()):
        raise UserError(f"Expected lists with something in them for attention, seeds and the grid of {path}.")
    jobs = []
    for attention, *values, seed in itertools.product(attentions, *grid.values(), seeds):
        chosen = dict(zip(grid, values, strict=True))
        name = "-".join([_plain(attention), *(f"{key}{_plain(str(value))}" for key, value in chosen.items())])
        settings = {**tables, **chosen}
        configure(task, attention, seed, options, settings)  # type: ignore[arg-type]
        jobs.append(Job(out / name / f"seed{seed}", task, attention, seed, options, settings))
    return jobs


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "." else "-" for letter in text)
