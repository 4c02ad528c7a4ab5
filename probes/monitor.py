"""Watch a training run from inside somebody's own loop, transformers' Trainer or Lightning.

Every n steps the attention of one forward pass is measured, and a few scalars a layer go to the logger that the run
already has. The time that this takes is kept beside the time of the steps, and printed at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from torch import nn

from probes.measure import Watch
from probes.selection import Selection

METRICS = ("dispersion", "separation", "sink_ratio", "max_abs_logit", "entropy")
COLUMNS = ("p50", "p95", "max")

Log = Callable[[dict[str, float], int], None]


class Monitor:
    """Measures attention every n training steps.

    In one's own loop: `with monitor.step(model, step): loss = model(**batch).loss`. For transformers:
    `trainer.add_callback(monitor.trainer_callback(trainer))`; for Lightning:
    `Trainer(callbacks=[monitor.lightning_callback()])`.

    Args:
        every: steps between two measurements; the first step is measured.
        selections: what each query is to keep; `full` and `topk:5` where omitted.
        metrics: which metrics to log.
        columns: which columns of the table to log.
        queries: the share of the queries to look at.
        log: called with the scalars and the step. Scalars are named `attention/SELECTION/METRIC/COLUMN` for the whole
            model and with `/layer` and its index behind for each layer.
        report: called with a sentence on the overhead at the end; `print` where omitted.

    Attributes:
        history: all scalars logged, by step.

    Raises:
        ValueError: if `every` is not positive.
    """

    def __init__(
        self,
        every: int = 100,
        selections: Sequence[Selection | str] = ("full", "topk:5"),
        *,
        metrics: Sequence[str] = METRICS,
        columns: Sequence[str] = COLUMNS,
        queries: float = 1.0,
        log: Log | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        if every < 1:
            raise ValueError(f"Expected `every` to be at least 1 step, but got {every!r}.")
        self.every = every
        self.selections = selections
        self.metrics, self.columns, self.queries = tuple(metrics), tuple(columns), queries
        self.log = log
        self.history: dict[int, dict[str, float]] = {}
        self._report = report
        self._watched = self._plain = 0.0
        self._steps = self._measured = 0

    def step(self, model: nn.Module, number: int) -> _Step:
        """One training step.

        Args:
            model: the model.
            number: the step.

        Returns:
            A context for the step's forward pass.
        """
        return _Step(self, model, number)

    def overhead(self) -> float:
        """Time spent on measuring, as a share of the time of the steps without it.

        Returns:
            The share; 0 before anything was measured, or without a plain step to compare with.
        """
        if not self._measured or self._steps == self._measured:
            return 0.0
        plain = self._plain / (self._steps - self._measured)
        return max(0.0, self._watched - plain * self._measured) / (plain * self._steps)

    def finish(self) -> None:
        """Report the overhead."""
        self._report(
            f"attention measured in {self._measured} of {self._steps} steps; it took {self.overhead():.1%} of the time"
        )

    def _record(self, watch: Watch, number: int) -> None:
        table = watch.table()
        table = table[table["metric"].isin(self.metrics) & (table["count"] > 0) & (table["scope"] != "head")]
        scalars = {}
        for row in table.to_dict("records"):
            place = row["module"] if pd.isna(row["layer"]) else row["layer"]
            layer = f"/layer{place}" if row["scope"] == "layer" else ""
            for column in self.columns:
                name = f"attention/{row['selection']}/{row['metric']}/{column}{layer}"
                scalars[name] = float(row[column])
        self.history[number] = scalars
        if self.log is not None:
            self.log(scalars, number)

    def trainer_callback(self, trainer: Any = None) -> Any:
        """The monitor as a callback of transformers' Trainer.

        Args:
            trainer: the trainer, to log through the loggers that it has, beside `log`:
                `trainer.add_callback(monitor.trainer_callback(trainer))`.

        Returns:
            A `TrainerCallback`.
        """
        from transformers import TrainerCallback

        monitor = self

        class Callback(TrainerCallback):  # type: ignore[misc, unused-ignore]
            """Begins a step's measurement with the step, and ends it when the step is done."""

            _step: _Step | None = None

            def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
                self._step = monitor.step(model, state.global_step)
                self._step.__enter__()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if self._step is not None:
                    self._step.__exit__(None, None, None)
                    scalars = monitor.history.get(self._step.number)
                    if scalars and trainer is not None:
                        trainer.log(dict(scalars))
                    self._step = None

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                monitor.finish()

        return Callback()

    def lightning_callback(self) -> Any:
        """The monitor as a callback of Lightning.

        Returns:
            A `Callback` that logs through the module's own `log_dict`.

        Raises:
            ValueError: if Lightning is not installed.
        """
        try:
            from lightning.pytorch import Callback  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            try:
                from pytorch_lightning import Callback  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                raise ValueError("Expected Lightning to be installed for its callback; install lightning.") from None

        monitor = self

        class Lightning(Callback):  # type: ignore[misc, unused-ignore]
            """Begins a measurement with the batch, and ends it with the batch."""

            _step: _Step | None = None

            def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
                self._step = monitor.step(pl_module, trainer.global_step)
                self._step.__enter__()

            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
                if self._step is not None:
                    self._step.__exit__(None, None, None)
                    scalars = monitor.history.get(self._step.number)
                    if scalars:
                        pl_module.log_dict(scalars)
                    self._step = None

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                monitor.finish()

        return Lightning()


class _Step:
    """The context of one step: measures if it is the step's turn, and takes the time either way."""

    def __init__(self, monitor: Monitor, model: nn.Module, number: int) -> None:
        self.number = number
        self._monitor = monitor
        self._watch: Watch | None = None
        if number % monitor.every == 0 and number not in monitor.history:
            self._watch = Watch(model, monitor.selections, queries=monitor.queries, seed=number, on_missing="warn")

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        if self._watch is not None:
            self._watch.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        monitor = self._monitor
        if self._watch is not None:
            self._watch.__exit__(kind, error, trace)
            if kind is None and self._watch.calls:
                monitor._record(self._watch, self.number)
        taken = time.perf_counter() - self._start
        monitor._steps += 1
        if self._watch is None:
            monitor._plain += taken
        else:
            monitor._watched += taken
            monitor._measured += 1
