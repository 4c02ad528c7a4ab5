"""`stability probe` and `stability merge`: measure a checkpoint's attention, whole or in parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stability.errors import UserError
from stability.files import read_table, refuse_existing, write_table

if TYPE_CHECKING:
    import pandas as pd

    from stability.checkpoints import Checkpoint

MEASUREMENTS = "measurements.parquet"
GIGABYTE = 2**30


def run_probe(
    checkpoint: Path,
    selections: Sequence[str] = ("full",),
    text: Path | None = None,
    dataset: Path | None = None,
    limit: int | None = None,
    length: int | None = None,
    batch_size: int = 32,
    out: Path | None = None,
    force: bool = False,
    shard: str | None = None,
    queries: float = 1.0,
    seed: int = 0,
    include_padding: bool = False,
    on_missing: Literal["raise", "warn"] = "raise",
    memory: float = 1.0,
    raw: Path | None = None,
    progress: bool | None = None,
) -> pd.DataFrame:
    """Measure a checkpoint and write the measurement table.

    Args:
        checkpoint: whatever `stability.open` takes.
        selections: short names of selections.
        text: a UTF-8 text file for the checkpoint's own tokenizer, one document a line, or packed if `length` is given.
        dataset: token ids, .npy or .parquet.
        limit: number of sequences or documents; all where omitted.
        length: tokens to which text is packed or sequences are cut.
        batch_size: sequences in a batch.
        out: the file to write, or a folder for `measurements.parquet`; the run folder where omitted, and the working
            folder for checkpoints that are not run folders.
        force: replace an existing file.
        shard: `i/n`: measure the i-th of every n batches only, and write a part for `run_merge`.
        queries: the share of the queries to look at.
        seed: of their choice.
        include_padding: count padded queries too.
        on_missing: `raise` or `warn` if a layer that looks like attention can't be read.
        memory: gigabytes of values to keep for exact percentiles.
        raw: a new folder for every query's own values.
        progress: show a progress bar; where omitted, only on a terminal.

    Returns:
        The table, or the part; `frame.attrs["path"]` says where it was written.

    Raises:
        UserError: if the inputs are not as described.
    """
    number, total = _shard(shard)
    if text is not None and dataset is not None:
        raise UserError("Expected --text or --dataset, but got both.")
    target = _target(checkpoint, out, shard=None if shard is None else (number, total))
    refuse_existing(target, force=force)

    import probes
    import stability
    from probes.measure import Watch, watch_batches

    chosen = [probes.parse(name) for name in selections]
    opened = stability.open(checkpoint)
    batches = inputs(opened, text=text, dataset=dataset, limit=limit, length=length, batch_size=batch_size)
    watching = Watch(
        opened.model,
        chosen,
        name=checkpoint.resolve().name,
        include_padding=include_padding,
        queries=queries,
        seed=seed,
        on_missing=on_missing,
        memory=int(memory * GIGABYTE),
        raw=raw,
    )
    watch_batches(opened.model, batches, watching, shard=(number, total), progress=progress)
    table = watching.table() if shard is None else watching.store.state()
    settings: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "text": text and str(text),
        "dataset": dataset and str(dataset),
    }
    settings |= {"limit": limit, "length": length, "batch_size": batch_size, "queries": queries, "seed": seed}
    found = {
        "missing": watching.findings.missing,
        "not_softmax_attention": watching.findings.other,
        "nan": watching.nan,
    }
    write_table(table, target, settings=settings, shard=[number, total], **found)
    table.attrs |= found | {"path": str(target)}
    return table


def run_merge(parts: Sequence[Path], out: Path | None = None, force: bool = False) -> pd.DataFrame:
    """Make one measurement table of the parts that `run_probe` wrote with `shard`.

    Args:
        parts: all the parts.
        out: the file to write, or a folder for `measurements.parquet`; beside the first part where omitted.
        force: replace an existing file.

    Returns:
        The table; `frame.attrs["path"]` says where it was written.

    Raises:
        UserError: if a part is missing, comes twice, or belongs to another measurement.
    """
    if not parts:
        raise UserError("Expected the parts of a measurement, but got none.")
    target = _named(parts[0].parent if out is None else out, MEASUREMENTS)
    refuse_existing(target, force=force)

    from probes.accumulate import STATE, Store

    frames = [read_table(part, columns=STATE) for part in parts]
    records = [frame.attrs["provenance"] for frame in frames]
    _complete(parts, records)
    stores = (Store.restore(frame) for frame in frames)
    whole = next(stores)
    for store in stores:
        whole.merge(store)
    table = whole.table()
    nan: dict[str, int] = {}
    for record in records:
        for module, count in record.get("nan", {}).items():
            nan[module] = nan.get(module, 0) + count
    found = {
        name: {key: value for record in records for key, value in record.get(name, {}).items()}
        for name in ("missing", "not_softmax_attention")
    } | {"nan": nan}
    write_table(table, target, settings=records[0].get("settings"), parts=[str(part) for part in parts], **found)
    table.attrs |= found | {"path": str(target)}
    return table


def inputs(
    checkpoint: Checkpoint,
    *,
    text: Path | None = None,
    dataset: Path | None = None,
    limit: int | None = None,
    length: int | None = None,
    batch_size: int = 32,
) -> Iterator[Any]:
    """Batches for a checkpoint's model, from text, token ids or the checkpoint's own data.

    Args:
        checkpoint: the opened checkpoint.
        text: a UTF-8 text file.
        dataset: a file of token ids.
        limit: number of sequences or documents.
        length: tokens to which text is packed or sequences are cut.
        batch_size: sequences in a batch.

    Returns:
        Mappings for `model(**batch)`, or tensors.

    Raises:
        UserError: if a number is not positive, or the checkpoint can't take such inputs.
    """
    from probes.inputs import packed, read_lines, token_ids

    for name, value in (("limit", limit), ("length", length), ("batch-size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"Expected --{name} to be at least 1, but got {value}.")
    if dataset is not None:
        batches = token_ids(dataset, length=length, batch_size=batch_size, limit=limit)
        return batches if checkpoint.kind == "transformers" else _bare(batches, dataset)
    if text is not None and length is not None:
        if checkpoint.tokenizer is None:
            raise UserError(f"Expected a tokenizer in {checkpoint.path} to read text with, but there is none.")
        return packed(checkpoint.tokenizer, read_lines(text), length, batch_size=batch_size, limit=limit)
    own: Iterator[Any] = checkpoint.batches(limit=limit, batch_size=batch_size, text=text)
    return own if length is None else (batch[:, :length] for batch in own)


def _bare(batches: Iterator[dict[str, Any]], source: Path) -> Iterator[Any]:
    for batch in batches:
        if "attention_mask" in batch:
            raise UserError(f"Expected sequences of one length in {source} for this model, but they differ.")
        yield batch["input_ids"]


def _shard(shard: str | None) -> tuple[int, int]:
    if shard is None:
        return 1, 1
    found = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"Expected --shard as i/n with i from 1 to n, such as 3/16, but got {shard!r}.")
    return int(found[1]), int(found[2])


def _target(checkpoint: Path, out: Path | None, shard: tuple[int, int] | None) -> Path:
    name = MEASUREMENTS if shard is None else f"measurements-{shard[0]}-of-{shard[1]}.parquet"
    if out is not None:
        return _named(out, name)
    # A run folder is ours to write into; somebody else's model is not.
    ours = (checkpoint / "config.toml").is_file()
    return checkpoint / name if ours else Path(name)


def _named(out: Path, name: str) -> Path:
    return out if out.suffix == ".parquet" and not out.is_dir() else out / name


def _complete(parts: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> None:
    shards = [tuple(record.get("shard", ())) for record in records]
    total = shards[0][1] if shards[0] else 0
    if any(not shard or shard[1] != total for shard in shards):
        raise UserError(
            f"Expected parts of one measurement, but got {', '.join(f'{p}' for p in parts)} of different ones."
        )
    numbers = sorted(shard[0] for shard in shards)
    if numbers != list(range(1, total + 1)):
        lacking = sorted(set(range(1, total + 1)) - set(numbers))
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        what = f"part {lacking[0]} is missing" if lacking else f"part {twice[0]} comes twice"
        raise UserError(f"Expected each of the {total} parts once, but {what}.")
    if any(record.get("settings") != records[0].get("settings") for record in records):
        raise UserError("Expected parts of one measurement, but their settings differ.")
