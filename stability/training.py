"""Training of the paper's encoder on a task, as a function of its settings and one seed.

Same settings, same seed, same machine: the same history and weights, bit for bit. Batch order and dropout have
generators of their own, so that models that differ in their attention alone see the same batches and start from the
same weights.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from probes.selection import RandomK
from stability.attention import SelfAttention
from stability.evaluation import batches, evaluate, loss_fn
from stability.model import Encoder
from stability.runs import BEST, COLUMNS, Outcome, Run, Workshop, save_weights
from stability.settings import RunConfig, Settings, TrainingConfig, configure
from stability.tasks import Data, Examples, Task


def train(
    task: str | Task,
    attention: str = "full",
    *,
    seed: int = 1,
    out: str | Path | None = None,
    force: bool = False,
    resume: bool = False,
    progress: bool | None = None,
    task_options: Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> Run:
    """Train an encoder on a task.

    Training accuracy is that of the model after the epoch over the whole training set, without dropout; it is what
    `stop_at` and `epochs_to` go by.

    Args:
        task: a task or its name, such as `even-pairs`.
        attention: short name of the selection that the model attends with, such as `full` or `topk:5`.
        seed: of data, initial weights, batch order and dropout.
        out: the run folder to write; nothing is written where omitted.
        force: replace an existing run folder.
        resume: go on with an interrupted run, or with a finished one for more epochs, bit for bit as if it had not
            stopped.
        progress: show a progress bar; where omitted, only on a terminal.
        task_options: fields of the task's dataclass, where `task` is a name.
        **settings: fields of `EncoderConfig` and `TrainingConfig`; where omitted, the paper's for this task.

    Returns:
        The run.

    Raises:
        UserError: if a name or value is wrong, or `out` exists or can't be written to.
    """  # noqa: DOC502
    config = configure(task, attention, seed, task_options, settings)
    if out is None:
        return _Trainer(config, config.task.data(seed)).run(progress=progress)
    workshop = Workshop(Path(out), force=force, resume=resume)
    try:
        trainer = _Trainer(config, config.task.data(seed), workshop)
        run = trainer.run(progress=progress)
        workshop.finish(run)
    finally:
        workshop.abandon()
    return dataclasses.replace(run, folder=Path(out))


def make_optimizer(model: Encoder, config: TrainingConfig) -> torch.optim.Optimizer:
    """Build the optimiser.

    Args:
        model: the model whose parameters it moves.
        config: its settings.

    Returns:
        Plain SGD or Adam.
    """
    kind = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.Adam
    return kind(model.parameters(), lr=config.learning_rate, foreach=True)


@dataclass(frozen=True, eq=False)
class _Set:
    sequences: Tensor
    labels: Tensor

    @classmethod
    def of(cls, examples: Examples) -> _Set:
        return cls(torch.from_numpy(examples.sequences), torch.from_numpy(examples.labels))


class _Trainer:
    """The state of a run between two epochs."""

    def __init__(self, config: RunConfig, data: Data, workshop: Workshop | None = None) -> None:
        self.config, self.workshop = config, workshop
        self.train, self.held_out = _Set.of(data.train), _Set.of(data.held_out)
        self.record: dict[str, Any] = {
            "majority_accuracy_train": data.train.majority,
            "majority_accuracy_heldout": data.held_out.majority,
            "heldout_disjoint": data.disjoint,
        }
        self.model = Encoder(config.model, seed=config.seed)
        self.record["parameters"] = sum(p.numel() for p in self.model.parameters())
        self.optimizer = make_optimizer(self.model, config.training)
        self.order = torch.Generator().manual_seed(_derived(config.seed, "order"))
        self.drops = torch.Generator().manual_seed(_derived(config.seed, "dropout"))
        self.model.use_generator(self.drops)
        self.rows: list[dict[str, float]] = []
        begun = workshop.begun(config) if workshop is not None else None
        if begun is not None:
            state, history = begun
            self._restore(state)
            self.rows = history.to_dict("records")  # type: ignore[assignment]

    def run(self, *, progress: bool | None = None) -> Run:
        settings = self.config.training
        outcome: Outcome = "finished"
        name = f"{self.config.task.name}, {self.config.model.attention}"
        shown = None if progress is None else not progress
        with tqdm(total=settings.epochs, initial=len(self.rows), desc=name, unit="epoch", disable=shown) as bar:
            while len(self.rows) < settings.epochs and not self._reached(settings.stop_at):
                row = self._epoch(len(self.rows) + 1)
                self.rows.append(row)
                bar.update()
                bar.set_postfix(loss=f"{row['train_loss']:.4f}", accuracy=f"{row['train_accuracy']:.1%}")
                if not math.isfinite(row["train_loss"]):
                    outcome = "diverged"
                    bar.write(f"{name}: the loss was no longer finite in epoch {len(self.rows)}; this run stops here.")
                    break
                self._save(row)
        if outcome == "finished" and self._reached(settings.stop_at):
            outcome = "stopped early"
        best = self._best()
        if best is not None:
            self.record |= {"best_epoch": best, "best_heldout_accuracy": self.rows[best - 1]["heldout_accuracy"]}
        self.model.use_generator(None)
        return Run(self.config, self.history(), self.model.eval(), outcome, self.record)

    def history(self) -> pd.DataFrame:
        frame = pd.DataFrame(self.rows, columns=list(COLUMNS))
        return frame.astype({name: "int64" if name == "epoch" else "float64" for name in COLUMNS})

    def _reached(self, accuracy: float | None) -> bool:
        return accuracy is not None and bool(self.rows) and self.rows[-1]["train_accuracy"] >= accuracy

    def _best(self) -> int | None:
        # The first of equals.
        accuracies = [row["heldout_accuracy"] for row in self.rows if math.isfinite(row["heldout_accuracy"])]
        return accuracies.index(max(accuracies)) + 1 if accuracies else None

    def _epoch(self, epoch: int) -> dict[str, float]:
        begun = time.perf_counter()
        settings = self.config.training
        rate = settings.learning_rate * settings.decay ** (epoch - 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        order = torch.randperm(len(self.train.sequences), generator=self.order)
        norms: list[float] = []
        for inputs, labels in batches(self.train.sequences, self.train.labels, settings.batch_size, order):
            self._redraw((epoch - 1) * math.ceil(len(order) / settings.batch_size) + len(norms))
            norms.append(step(self.model, self.optimizer, inputs, labels, settings.clip))
            if not math.isfinite(norms[-1]):
                break
        self._redraw(0)
        finite = math.isfinite(norms[-1])
        nothing = (math.nan, math.nan)
        train = evaluate(self.model, self.train.sequences, self.train.labels) if finite else nothing
        held_out = evaluate(self.model, self.held_out.sequences, self.held_out.labels) if finite else nothing
        seconds = time.perf_counter() - begun
        values = (epoch, *train, *held_out, seconds, math.fsum(norms) / len(norms), rate)
        return dict(zip(COLUMNS, values, strict=True))

    def _redraw(self, number: int) -> None:
        # Random keys are drawn anew at each step, as a function of the step; evaluation has a draw of its own.
        if "random-k" not in self.config.model.attention:
            return
        for block in self.model.modules():
            if isinstance(block, SelfAttention) and isinstance(block.selection, RandomK):
                base = self.config.model.selection
                assert isinstance(base, RandomK)
                block.selection = dataclasses.replace(base, seed=base.seed + number)

    def _save(self, row: Mapping[str, float]) -> None:
        if self.workshop is None:
            return
        if self._best() == row["epoch"]:
            save_weights(self.model.state_dict(), self.workshop.folder / BEST)
        self.workshop.save(self.config, self.history(), self._state())

    def _state(self) -> dict[str, Tensor]:
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in slots.items()}
        state |= {"generator.order": self.order.get_state(), "generator.dropout": self.drops.get_state()}
        return state | {"epoch": torch.tensor(len(self.rows))}

    def _restore(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict({n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")})
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            if name.startswith("optimizer."):
                _, index, slot = name.split(".")
                slots.setdefault(int(index), {})[slot] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.order.set_state(state["generator.order"])
        self.drops.set_state(state["generator.dropout"])


def step(model: Encoder, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor, clip: float) -> float:
    """Take one step on one batch.

    Args:
        model: the model, in training mode.
        optimizer: moves the model's parameters.
        inputs: token indices.
        labels: their labels.
        clip: largest gradient norm.

    Returns:
        The gradient norm before clipping; where it is not finite, no step was taken.
    """
    optimizer.zero_grad(set_to_none=True)
    loss_fn(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True))
    if math.isfinite(norm):
        optimizer.step()
    return norm


def _derived(seed: int, purpose: str) -> int:
    return int(np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint64)[0] >> np.uint64(1))
