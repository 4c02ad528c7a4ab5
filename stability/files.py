"""Atomic files, and tables that remember where they came from.

Every table that a part of this project hands to another is a Parquet file; its provenance (versions, command, time,
and whatever the writer adds) travels inside the file, in the schema's metadata.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

METADATA_KEY = b"softmax-stability"


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it into place only if the block succeeds.

    Args:
        path: the file to write. Its folder is made if it is missing.

    Yields:
        The temporary path to write to.

    Raises:
        UserError: if the folder can't be made or written to.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise UserError(
            f"Expected a writable folder for {target}, but got {error.strerror}; choose another place."
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes private files; a finished one gets the permissions that open() would have given it.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; move it into place only if the block succeeds.

    Args:
        path: the folder to make.
        force: replace what is there.

    Yields:
        The temporary folder to fill.

    Raises:
        UserError: if `path` exists and `force` is False, or its parent can't be written to.
    """
    target = Path(path)
    refuse_existing(target, force=force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"Expected a writable folder for {target}, but got {error.strerror}; choose another place."
        ) from error
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(path: str | os.PathLike[str], *, force: bool) -> None:
    """Stop before an existing file, or a folder with something in it, is overwritten.

    Args:
        path: what is about to be written.
        force: overwrite anyway.

    Raises:
        UserError: if something is there and `force` is False.
    """
    target = Path(path)
    if force or not target.exists():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    raise UserError(f"{target} exists already; give --force to replace it, or choose another place.")


def provenance(**extra: object) -> dict[str, Any]:
    """Describe how a table comes into being: package versions, command line, time, and `extra`.

    Args:
        **extra: anything else worth keeping, such as the seed; must be JSON-serialisable or have a `str`.

    Returns:
        A dictionary of plain values.
    """
    versions = {"python": platform.python_version()}
    for package in ("softmax-stability", "torch", "numpy", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "command": " ".join(sys.argv),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        **extra,
    }


def write_table(frame: pd.DataFrame, path: str | os.PathLike[str], **extra: object) -> Path:
    """Write a table as Parquet, atomically, with its provenance in the file's metadata.

    Args:
        frame: the table.
        path: where to write it.
        **extra: added to the provenance, for example `seed=1`.

    Returns:
        The path written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    record = json.dumps(provenance(**extra), default=str).encode()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), METADATA_KEY: record})
    with atomic_write(path) as temporary:
        pq.write_table(table, temporary)
    return Path(path)


def read_table(path: str | os.PathLike[str], columns: Sequence[str] = ()) -> pd.DataFrame:
    """Read a Parquet table and check that it has the columns it should have.

    Args:
        path: the file.
        columns: names that must be there.

    Returns:
        The table, with its provenance in `frame.attrs["provenance"]`.

    Raises:
        UserError: if the file is missing, is not Parquet, or lacks a column.
    """
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = Path(path)
    if not source.is_file():
        raise UserError(f"Expected a Parquet table at {source}, but there is no such file.")
    try:
        table = pq.read_table(source)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"Expected a Parquet table at {source}, but it can't be read as one; make it again.") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise UserError(
            f"Expected the table {source} to have the columns {', '.join(columns)}, but it lacks {', '.join(missing)}; "
            f"it has {', '.join(table.column_names)}."
        )
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    frame = table.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    frame.attrs["provenance"] = json.loads(metadata.get(METADATA_KEY, b"{}"))
    return frame
