"""Every setting of a training run: what the task, the model and the optimiser are, and how they are stored as TOML."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from stability import tasks
from stability.errors import UserError
from stability.model import EncoderConfig
from stability.tasks import Task


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained; the defaults are the paper's for its small tasks.

    Attributes:
        optimizer: `sgd` or `adam`.
        learning_rate: in the first epoch.
        decay: factor on the learning rate after each epoch.
        batch_size: sequences in a step; the last batch of an epoch may be smaller.
        clip: largest gradient norm; larger gradients are scaled down to it; infinity for no clipping.
        epochs: passes over the training set.
        stop_at: training accuracy at which to stop early; None to run all epochs.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = 0.1
    decay: float = 0.9995
    batch_size: int = 25
    clip: float = 0.5
    epochs: int = 100
    stop_at: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise UserError(f"Expected `optimizer` to be 'sgd' or 'adam', but got {self.optimizer!r}.")
        for name in ("batch_size", "epochs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"Expected `{name}` to be a whole number of at least 1, but got {value!r}.")
        for name in ("learning_rate", "decay", "clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UserError(f"Expected `{name}` to be a number above 0, but got {value!r}.")
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise UserError(f"Expected `stop_at` to be an accuracy above 0 and at most 1, but got {self.stop_at!r}.")


class Settings(TypedDict, total=False):
    """What `stability.train` takes beside the task, the attention and the seed; see the two configurations."""

    blocks: int
    width: int
    hidden: int
    heads: int
    head_width: int | None
    activation: str
    dropout: float
    causal: bool
    inverse_temperature: float
    scalable_softmax: bool
    paper_compat: bool
    optimizer: Literal["sgd", "adam"]
    learning_rate: float
    decay: float
    batch_size: int
    clip: float
    epochs: int
    stop_at: float | None


MODEL_SETTINGS = (
    "blocks", "width", "hidden", "heads", "head_width", "activation", "dropout", "causal", "inverse_temperature",
    "scalable_softmax", "paper_compat",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """What a training run is a function of.

    Attributes:
        task: the task.
        model: the architecture.
        training: the optimiser's settings.
        seed: of data, initial weights, batch order and dropout.
    """

    task: Task
    model: EncoderConfig
    training: TrainingConfig
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"Expected `seed` to be a whole number from 0 to 2**63 - 1, but got {self.seed!r}.")

    def tables(self) -> dict[str, Any]:
        """The configuration as plain values.

        Returns:
            Nested dictionaries, without values that are None.
        """
        parts: dict[str, Any] = {"task_options": self.task, "model": self.model, "training": self.training}
        tables = {
            name: {k: v for k, v in dataclasses.asdict(part).items() if v is not None} for name, part in parts.items()
        }
        return {"task": self.task.name, "seed": self.seed, **tables}


def configure(
    task: str | Task, attention: str, seed: int, options: Mapping[str, Any] | None, given: Settings
) -> RunConfig:
    """Put a configuration together from what was given, the task's published settings and the defaults, in this order.

    Args:
        task: a task or its name.
        attention: short name of a selection.
        seed: of everything random.
        options: fields of the task's dataclass, where `task` is a name.
        given: settings that were given.

    Returns:
        The configuration.

    Raises:
        UserError: if a name or a value is wrong.
    """
    if isinstance(task, Task) and options:
        raise UserError("Expected task options beside the name of a task only, but got a task object and options.")
    chosen = task if isinstance(task, Task) else tasks.make(task, options)
    names = Settings.__annotations__
    if unknown := [name for name in given if name not in names]:
        raise UserError(f"Expected settings among {', '.join(names)}, but got {', '.join(unknown)}.")
    settings: dict[str, Any] = {"causal": chosen.causal, **chosen.defaults, **given}
    model = EncoderConfig(
        tokens=chosen.vocabulary,
        classes=chosen.outputs,
        readout=chosen.readout,
        padding=chosen.padding,
        attention=attention,
        **{name: settings[name] for name in MODEL_SETTINGS if name in settings},
    )
    training = TrainingConfig(**{name: settings[name] for name in settings if name not in MODEL_SETTINGS})
    return RunConfig(chosen, model, training, seed)


def read_config(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Read a run folder's config.toml.

    Args:
        path: the file.

    Returns:
        The configuration, and the tables that are about the run (`result`, `provenance`).

    Raises:
        UserError: if the file is missing, is not TOML, or describes no run.
    """
    if not path.is_file():
        raise UserError(f"Expected a run folder with a config.toml, but {path} does not exist.")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        config = RunConfig(
            tasks.make(tables.pop("task"), tables.pop("task_options")),
            EncoderConfig(**tables.pop("model")),
            TrainingConfig(**tables.pop("training")),
            tables.pop("seed"),
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"Expected {path} to be TOML, but it can't be read ({error}).") from error
    except KeyError as error:
        raise UserError(f"Expected {path} to describe a training run, but it has no {error.args[0]!r}.") from error
    except (TypeError, AttributeError) as error:
        raise UserError(f"Expected {path} to describe a training run, but it does not fit ({error}).") from error
    except ValueError as error:
        raise UserError(f"Expected {path} to describe a training run that this version knows: {error}") from error
    if unknown := sorted(tables.keys() - {"result", "provenance"}):
        raise UserError(f"Expected {path} to describe a training run, but it also has {', '.join(unknown)}.")
    return config, tables


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write plain values as TOML.

    Args:
        tables: strings, numbers, booleans, lists of them, and dictionaries of these, nested at most once more.

    Returns:
        The text.
    """

    def section(name: str, table: Mapping[str, Any]) -> list[str]:
        plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
        lines = [f"\n[{name}]"] if name else []
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in plain.items() if value is not None]
        for key, value in table.items():
            if isinstance(value, Mapping):
                lines += section(f"{name}.{_key(key)}" if name else _key(key), value)
        return lines

    return "\n".join(section("", tables)) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # A JSON string is a TOML string once the one character that JSON may leave bare is escaped.
    return json.dumps(str(value)).replace("\x7f", "\\u007f")
