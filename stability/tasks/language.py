"""Language modelling on a text file, with a SentencePiece vocabulary learned from its training part.

[1] Kudo and Richardson, SentencePiece, EMNLP 2018 (system demonstrations).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from stability.errors import UserError
from stability.tasks.base import IGNORED, Data, Examples, Task, Tokens, task


@task("language")
@dataclass(frozen=True)
class Language(Task):
    """Predict the next token of a UTF-8 text file; models see earlier tokens only.

    The last tenth of the lines is held out. The vocabulary is learned on the rest, which is then cut into pieces of
    `length` tokens. `train` and `held_out` bound the number of pieces.

    Attributes:
        file: the text.
        length: tokens in a sequence.
        vocabulary_size: of the SentencePiece model; lowered where the text is too small for it.
        model_type: `unigram` or `bpe`.
    """

    tokens: ClassVar[int] = 0
    classes: ClassVar[int] = 0
    readout: ClassVar[Literal["mean", "tokens"]] = "tokens"
    causal: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "epochs": 50, "blocks": 8, "width": 32, "hidden": 128, "learning_rate": 1.0, "decay": 0.99, "batch_size": 128,
    }  # fmt: skip

    train: int = 1_000_000
    held_out: int = 1_000_000
    file: str = ""
    length: int = 64
    vocabulary_size: int = 4096
    model_type: Literal["unigram", "bpe"] = "unigram"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("length", 2)
        self.at_least("vocabulary_size", 16)
        if self.model_type not in ("unigram", "bpe"):
            raise UserError(
                f"Expected `model_type` of the task language to be unigram or bpe, but got {self.model_type!r}."
            )
        if not self.file:
            raise UserError("Expected a text file for the task language, but got none; give the option file=PATH.")

    @property
    def vocabulary(self) -> int:
        """Number of tokens, padding included."""
        return self.vocabulary_size + 1

    @property
    def outputs(self) -> int:
        """Number of classes that a model of this task tells apart."""
        return self.vocabulary_size

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw pieces of the training text with replacement.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples; the label of a token is the next one.
        """
        train = self.data(0).train
        picked = rng.integers(0, len(train), count)
        return Examples(train.sequences[picked], train.labels[picked])

    def data(self, seed: int) -> Data:
        """Cut the text into sequences; the seed does not matter.

        Args:
            seed: not used, the text is what it is.

        Returns:
            Both parts, from different lines.
        """
        lines = self._lines()
        end = max(1, min(len(lines) - 1, round(0.9 * len(lines))))
        model = self.learn(lines[:end])
        train, held_out = (self._pieces(model, part) for part in (lines[:end], lines[end:]))
        rows = {row.tobytes() for row in train.sequences}
        disjoint = not any(row.tobytes() in rows for row in held_out.sequences[: self.held_out])
        cut = (slice(None, self.train), slice(None, self.held_out))
        parts = [Examples(e.sequences[c], e.labels[c]) for e, c in zip((train, held_out), cut, strict=True)]
        return Data(parts[0], parts[1], disjoint)

    def learn(self, lines: list[str]) -> Any:
        """Learn a vocabulary.

        Args:
            lines: the text.

        Returns:
            A `SentencePieceProcessor`.

        Raises:
            UserError: if sentencepiece is not installed or can learn nothing from the text.
        """
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError(
                "Expected the package sentencepiece for the task language; install softmax-stability[text]."
            ) from error
        stream = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=stream,
                vocab_size=self.vocabulary_size,
                model_type=self.model_type,
                hard_vocab_limit=False,
                num_threads=1,
                minloglevel=2,
            )
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"Expected enough text in {self.file} for {self.vocabulary_size} tokens, but no vocabulary can be "
                f"learned from it ({reason}); lower `vocabulary_size` or give more text."
            ) from error
        return sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())

    def _lines(self) -> list[str]:
        path = Path(self.file)
        if not path.is_file():
            raise UserError(f"Expected a text file at {path}, but there is no such file.")
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"Expected {path} to be UTF-8 text, but byte {error.start} is not; convert the file first."
            ) from error
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise UserError(f"Expected at least two lines of text in {path}, but got {len(lines)}.")
        return lines

    def _pieces(self, model: Any, lines: list[str]) -> Examples:
        ids: list[int] = []
        for line in model.encode(lines):
            ids += [*line, model.eos_id()]
        if len(ids) < 2:
            raise UserError(f"Expected more text in {self.file}, but a part of it has only {len(ids)} tokens.")
        count = -(-(len(ids) - 1) // self.length)
        inputs = np.full(count * self.length, self.padding, dtype=np.int64)
        labels: Tokens = np.full(count * self.length, IGNORED, dtype=np.int64)
        inputs[: len(ids) - 1] = ids[:-1]
        labels[: len(ids) - 1] = ids[1:]
        return Examples(inputs.reshape(count, -1), labels.reshape(count, -1))
