"""Batches for a language model: from lines of text, from text packed to one length, from files of token ids."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probes.errors import ProbeError


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a UTF-8 text file that are not blank.

    Args:
        path: the file.

    Returns:
        The lines, stripped.

    Raises:
        ProbeError: if the file is missing, is not UTF-8, or holds no text.
    """
    source = Path(path)
    if not source.is_file():
        raise ProbeError(f"Expected a text file at {source}, but there is no such file.")
    try:
        lines = [line.strip() for line in source.read_bytes().decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ProbeError(
            f"Expected {source} to be UTF-8 text, but byte {error.start} is not; convert the file first."
        ) from error
    if not any(lines):
        raise ProbeError(f"Expected text in {source}, but the file is empty.")
    return [line for line in lines if line]


def documents(
    tokenizer: Any, lines: Sequence[str], *, batch_size: int = 32, length: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """One document a line: padded batches in the given order.

    Args:
        tokenizer: of transformers, with a padding token if `batch_size` is above 1.
        lines: the documents.
        batch_size: documents in a batch.
        length: tokens after which a document is cut; the tokenizer's own limit where omitted.

    Yields:
        Mappings for `model(**batch)`.
    """
    size = batch_size if tokenizer.pad_token is not None else 1
    for first in range(0, len(lines), size):
        part = list(lines[first : first + size])
        yield dict(tokenizer(part, padding=size > 1, truncation=True, max_length=length, return_tensors="pt"))


def packed(
    tokenizer: Any, lines: Iterable[str], length: int, *, batch_size: int = 32, limit: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """All lines one after the other, cut to pieces of one length; what is left at the end is dropped.

    Args:
        tokenizer: of transformers.
        lines: the text.
        length: tokens in a piece.
        batch_size: pieces in a batch.
        limit: number of pieces; all where omitted.

    Yields:
        Mappings for `model(**batch)`, without padding.

    Raises:
        ProbeError: if the text is shorter than one piece, or a number is not positive.
    """
    for name, value in (("length", length), ("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise ProbeError(f"Expected `{name}` to be at least 1, but got {value}.")
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids = list(
        itertools.chain.from_iterable(
            [*tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"], *separator] for line in lines
        )
    )
    pieces = torch.tensor(ids[: len(ids) // length * length]).reshape(-1, length)[:limit]
    if not len(pieces):
        raise ProbeError(f"Expected text of at least {length} tokens, but got {len(ids)}; give a smaller length.")
    for first in range(0, len(pieces), batch_size):
        yield {"input_ids": pieces[first : first + batch_size]}


def token_ids(
    path: str | os.PathLike[str], *, length: int | None = None, batch_size: int = 32, limit: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Sequences of token ids from a file.

    Args:
        path: `.npy` with whole numbers, (sequence, token) or one long stream that `length` cuts; or `.parquet` with a
            column `input_ids` of lists, which are padded on the right.
        length: tokens of a sequence; longer ones are cut.
        batch_size: sequences in a batch.
        limit: number of sequences; all where omitted.

    Yields:
        Mappings for `model(**batch)`; with `attention_mask` where anything is padded.

    Raises:
        ProbeError: if the file is missing, damaged, empty or of another form.
    """
    rows = _rows(Path(path), length)
    rows = rows[:limit]
    if not len(rows) or any(len(row) == 0 for row in rows):
        raise ProbeError(f"Expected sequences of token ids in {path}, but some or all are empty.")
    for first in range(0, len(rows), batch_size):
        part = [np.asarray(row)[:length] for row in rows[first : first + batch_size]]
        longest = max(len(row) for row in part)
        ids, mask = np.zeros((2, len(part), longest), dtype=np.int64)
        for number, row in enumerate(part):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        batch = {"input_ids": torch.from_numpy(ids)}
        yield batch if mask.all() else batch | {"attention_mask": torch.from_numpy(mask)}


def _rows(path: Path, length: int | None) -> Any:
    if not path.is_file():
        raise ProbeError(f"Expected a file of token ids at {path}, but there is no such file.")
    if path.suffix == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ProbeError(f"Expected {path} to be a numpy file of token ids, but it can't be read.") from error
        if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
            raise ProbeError(f"Expected whole numbers (sequence, token) in {path}, but got {ids.dtype} {ids.shape}.")
        if ids.ndim == 2:
            return ids
        if length is None:
            raise ProbeError(f"Expected a length to cut the one long sequence in {path}; give --length.")
        return ids[: len(ids) // length * length].reshape(-1, length)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise ProbeError(f"Expected {path} to be a Parquet file, but it can't be read as one.") from error
        if "input_ids" not in table.column_names:
            raise ProbeError(f"Expected a column input_ids in {path}, but it has {', '.join(table.column_names)}.")
        return table["input_ids"].to_pylist()
    raise ProbeError(f"Expected token ids in a .npy or .parquet file, but got {path}.")
