"""Opening trained models of every kind under one interface: run folders, transformers folders, files of weights.

Nothing is ever unpickled freely: weights come from safetensors, torch's weights-only loader, or the restricted reader
in `stability.authors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stability.errors import UserError
from stability.evaluation import loss_fn
from stability.model import Encoder
from stability.runs import BEST, CONFIG, WEIGHTS, load_weights
from stability.settings import read_config
from stability.tasks import Data

Kind = Literal["run", "transformers", "authors", "weights"]
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model with what is needed to run it.

    Attributes:
        path: where it came from.
        kind: `run` (this project's run folder), `transformers` (a library folder), `authors` (a checkpoint of the
            paper's released code) or `weights` (a file of weights, with a model object from the caller).
        model: the model, in evaluation mode.
        config: its configuration: a `RunConfig`, the library's own, the settings dictionary of the released code, or
            None.
        tokenizer: the folder's own tokenizer; None if it has none.
        sequences: training sequences (sample, token); None where the checkpoint has no data.
        labels: their labels.
        held_out_sequences: held-out sequences; None where there are none.
        held_out_labels: their labels.
        loss: `loss(outputs, labels)`, mean cross-entropy in nats; None where there are no labels.
    """

    path: Path
    kind: Kind
    model: nn.Module
    config: Any = None
    tokenizer: Any = None
    sequences: Tensor | None = None
    labels: Tensor | None = None
    held_out_sequences: Tensor | None = None
    held_out_labels: Tensor | None = None
    loss: Callable[[Any, Any], Tensor] | None = None

    def batches(
        self,
        limit: int | None = None,
        batch_size: int = 32,
        *,
        text: Any = None,
        held_out: bool = False,
        labels: bool = False,
    ) -> Iterator[Any]:
        """Go over inputs for the model, from the checkpoint's own data or from text.

        Args:
            limit: number of sequences or lines; all where omitted.
            batch_size: sequences in a batch.
            text: a UTF-8 text file, one document a line, or a list of texts; needs a tokenizer.
            held_out: the held-out sequences instead of the training ones.
            labels: yield pairs (inputs, labels), for a loss.

        Returns:
            Batches: of the checkpoint's own data tensors (sequence, token), or where some are padded mappings with an
            `attention_mask`, so that probes leave padding out; of text mappings for `model(**batch)`.

        Raises:
            UserError: if there is nothing of the kind asked for, or a number is not positive.
        """
        for name, value in (("limit", limit), ("batch_size", batch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"Expected `{name}` to be a whole number of at least 1, but got {value!r}.")
        if text is not None:
            if labels:
                raise UserError("Expected labels from a checkpoint's own data only, but got a text.")
            return self._of_text(text, limit, batch_size)
        inputs = self.held_out_sequences if held_out else self.sequences
        targets = self.held_out_labels if held_out else self.labels
        if inputs is None:
            which = "held-out data" if held_out else "data"
            raise UserError(f"Expected {which} in the checkpoint {self.path}, but it holds none; give a text instead.")
        if labels and targets is None:
            raise UserError(f"Expected labels in the checkpoint {self.path}, but it holds none.")
        chosen = targets[:limit] if labels and targets is not None else None
        return self._of_data(inputs[:limit], chosen, batch_size)

    def _of_data(self, inputs: Tensor, targets: Tensor | None, size: int) -> Iterator[Any]:
        config = getattr(self.model, "config", None)
        padding = None if getattr(config, "paper_compat", True) else getattr(config, "padding", None)
        masked = padding is not None and bool((inputs == padding).any())
        for first in range(0, len(inputs), size):
            tokens = inputs[first : first + size]
            batch = {"tokens": tokens, "attention_mask": tokens != padding} if masked else tokens
            yield batch if targets is None else (batch, targets[first : first + size])

    def _of_text(self, text: Any, limit: int | None, size: int) -> Iterator[dict[str, Tensor]]:
        if self.tokenizer is None:
            raise UserError(f"Expected a tokenizer in {self.path} to read text with, but there is none.")
        lines = (list(text) if isinstance(text, list | tuple) else read_lines(text))[:limit]
        return self._tokenized(lines, size)

    def _tokenized(self, lines: list[str], size: int) -> Iterator[dict[str, Tensor]]:
        length = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        longest = min(int(length or 512), int(getattr(self.tokenizer, "model_max_length", None) or 512))
        padding = self.tokenizer.pad_token is not None
        for first in range(0, len(lines), size if padding else 1):
            batch = self.tokenizer(
                lines[first : first + (size if padding else 1)],
                padding=padding,
                truncation=True,
                max_length=longest,
                return_tensors="pt",
            )
            yield dict(batch)


def open(path: str | os.PathLike[str], model: nn.Module | None = None, *, best: bool = False) -> Checkpoint:
    """Open a trained model.

    Args:
        path: a run folder, a transformers folder (config.json with safetensors), a checkpoint file of the paper's
            released code, or a file of weights (.safetensors, or a .pt that loads under torch's weights-only rule).
        model: the model to load a plain file of weights into.
        best: of a run folder, the weights of the best held-out accuracy instead of the last ones.

    Returns:
        The checkpoint, its model in evaluation mode.

    Raises:
        UserError: if there is nothing, or something is missing, damaged or of another kind; the message says what.
    """
    place = Path(path)
    if not place.exists():
        raise UserError(f"Expected a checkpoint at {place}, but there is no such file or folder.")
    if place.is_dir():
        if (place / CONFIG).is_file():
            return _open_run(place, best=best)
        if (place / "config.json").is_file():
            return _open_transformers(place)
        raise UserError(
            f"Expected {place} to be a run folder ({CONFIG}) or a transformers folder (config.json), "
            "but it has neither file."
        )
    if model is not None:
        return _open_weights(place, model)
    if place.suffix in (".pt", ".pth", ".bin"):
        from stability.authors import open_authors

        return open_authors(place)
    raise UserError(f"Expected a model object to load the weights in {place} into, but got none.")


def _open_run(folder: Path, *, best: bool) -> Checkpoint:
    config, _ = read_config(folder / CONFIG)
    model = Encoder(config.model, seed=config.seed)
    fit(model, load_weights(folder / (BEST if best else WEIGHTS)), folder)
    return Checkpoint(
        path=folder,
        kind="run",
        model=model.eval(),
        config=config,
        loss=loss_fn,
        **_tensors(config.task.data(config.seed)),
    )


def _tensors(data: Data) -> dict[str, Any]:
    sets = {"": data.train, "held_out_": data.held_out}
    return {
        f"{prefix}{name}": torch.from_numpy(getattr(examples, name))
        for prefix, examples in sets.items()
        for name in ("sequences", "labels")
    }


def fit(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load weights into a model; every one must fit.

    Args:
        model: the model.
        weights: tensors by name.
        source: where they come from, for the message.

    Raises:
        UserError: if a name or a shape differs.
    """
    own = model.state_dict()
    if missing := sorted(own.keys() - weights.keys()):
        raise UserError(
            f"Expected the weights {', '.join(missing[:3])}, but {source} lacks {len(missing)} of {len(own)}."
        )
    if extra := sorted(weights.keys() - own.keys()):
        raise UserError(f"Expected weights of the model only, but {source} also holds {', '.join(extra[:3])}.")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise UserError(
                f"Expected {name} in {source} to have the shape {tuple(tensor.shape)} that the configuration says, "
                f"but got {tuple(weights[name].shape)}."
            )
    model.load_state_dict(weights)


def _open_weights(path: Path, model: nn.Module) -> Checkpoint:
    if path.suffix == ".safetensors":
        weights = load_weights(path)
    else:
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(
                f"Expected {path} to hold plain tensors, but torch's weights-only loader refuses it "
                f"({str(error).splitlines()[0]})."
            ) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"Expected {path} to be a state dictionary of tensors, but it is not.")
    fit(model, weights, path)
    return Checkpoint(path=path, kind="weights", model=model.eval())


def _open_transformers(folder: Path) -> Checkpoint:
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"Expected {folder / 'config.json'} to be JSON, but it can't be read ({error}).") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise UserError(f"Expected {folder / 'config.json'} to name a `model_type`, but it does not.")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise UserError(f"Expected weights (safetensors) beside {folder / 'config.json'}, but there are none.")
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "Expected the package transformers to open such a folder; install softmax-stability[hf]."
        ) from error
    from transformers.utils import logging

    named = next(iter(described.get("architectures") or ()), None)
    architecture = getattr(transformers, named, None) if isinstance(named, str) else None
    shown, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        kind = architecture or transformers.AutoModel
        model, report = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        raise UserError(
            f"Expected {folder} to hold a complete {described['model_type']} model, but it can't be loaded "
            f"({_first_line(error)})."
        ) from error
    finally:
        logging.set_verbosity(shown)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if missing := sorted(
        name for name in report["missing_keys"] if "pooler" not in name and "position_ids" not in name
    ):
        raise UserError(f"Expected all weights of the model in {folder}, but {len(missing)} are missing: {missing[0]}.")
    return Checkpoint(
        path=folder, kind="transformers", model=model.eval(), config=model.config, tokenizer=_tokenizer(folder)
    )


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(
            f"Expected the tokenizer in {folder} to be readable, but it is not ({_first_line(error)})."
        ) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def read_lines(path: Any) -> list[str]:
    """Read a text file's lines that are not blank.

    Args:
        path: a path, or a resource with `read_bytes`.

    Returns:
        The lines, stripped.

    Raises:
        UserError: if the file is missing, is not UTF-8, or has no text.
    """
    source = Path(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(source, Path) and not source.is_file():
        raise UserError(f"Expected a text file at {source}, but there is no such file.")
    try:
        lines = [line.strip() for line in source.read_bytes().decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise UserError(
            f"Expected {source} to be UTF-8 text, but byte {error.start} is not; convert the file first."
        ) from error
    if not any(lines):
        raise UserError(f"Expected text in {source}, but the file is empty or blank.")
    return [line for line in lines if line]
