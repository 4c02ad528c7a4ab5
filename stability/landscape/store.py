"""Finished chunks on disk: an append-only log that survives being killed at any point.

The log is a text file. Each line is a CRC-32 and a JSON object; the first describes what is traced, the others hold one
finished chunk each and are flushed to the disk before the next chunk starts. A line that a crash cut short fails its
check sum, and is cut off when the run is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stability.errors import UserError
from stability.landscape.evaluate import Plan, Values
from stability.landscape.objective import close_enough

LOG, SURFACE, DIRECTIONS = "surface.log", "surface.parquet", "directions.safetensors"
_SUBJECTS = {
    "model": "model",
    "data": "data",
    "directions": "directions",
    "points": "grid",
    "functions": "set of functions",
    "reduction": "reduction",
}


class Store:
    """The chunks of one surface in one folder; open for one run at a time.

    Args:
        folder: where the log is, or will be; made if it is missing.
        identity: fingerprints of model, data, directions, points and functions, and the values at the centre.
        plan: used if the log is new; an existing log keeps its own.
        force: start anew, whatever is there.

    Raises:
        UserError: if the log belongs to another model, data or directions, another run is writing to it, a surface
            without a log is there, or the folder can't be written to.
    """

    def __init__(
        self, folder: str | os.PathLike[str], identity: Mapping[str, Any], plan: Plan, *, force: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.path = self.folder / LOG
        self.chunks: dict[int, tuple[Values, float]] = {}
        if not force and (self.folder / SURFACE).exists() and not self.path.exists():
            raise UserError(
                f"{self.folder / SURFACE} exists already; give --force (force=True) or choose another place."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("r+b" if self.path.exists() else "x+b")
        except OSError as error:
            raise UserError(
                f"Expected a writable folder for {self.path}, but got {error.strerror}; choose another place."
            ) from error
        try:
            _lock(self._file, self.path)
            self.plan = self._start(identity, plan, force)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, start: int, values: Values, seconds: float) -> None:
        """Put a finished chunk on the disk.

        Args:
            start: index of its first point.
            values: by function, one number per point.
            seconds: per point.
        """
        self._append({"start": start, "seconds": seconds, "values": values})
        self.chunks[start] = (values, seconds)

    def _start(self, identity: Mapping[str, Any], plan: Plan, force: bool) -> Plan:
        records, end = _read(self._file.read())
        self._file.seek(0 if force else end)
        self._file.truncate()
        if force or not records:
            self._append(
                {"format": 1, "identity": dict(identity), "plan": {"method": plan.method, "chunk": plan.chunk}}
            )
            return plan
        header, *chunks = records
        self._compare(header.get("identity", {}), identity)
        self.chunks = {record["start"]: (record["values"], record["seconds"]) for record in chunks}
        return Plan(**header["plan"])

    def _compare(self, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        different = [subject for key, subject in _SUBJECTS.items() if stored.get(key) != given[key]]
        before, now = stored.get("center", {}), given["center"]
        if not different and not all(close_enough(before[name], now[name]) for name in now):
            different = ["loss or data"]
        if different:
            raise UserError(
                f"Expected to go on with the surface that {self.path} was started with, but got a different "
                f"{' and a different '.join(different)}; choose another place, or replace it with --force (force=True)."
            )

    def _append(self, record: Mapping[str, Any]) -> None:
        # One write of one whole line, and the disk has it before anything else happens.
        text = json.dumps(record).encode()
        self._file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        self._file.flush()
        os.fsync(self._file.fileno())


def _read(data: bytes) -> tuple[list[dict[str, Any]], int]:
    records: list[dict[str, Any]] = []
    end = 0
    for line in data.splitlines(keepends=True):
        check, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or check != b"%08x" % zlib.crc32(text):
            break
        records.append(json.loads(text))
        end += len(line)
    return records, end


def _lock(file: Any, path: Path) -> None:
    with contextlib.suppress(ImportError):  # no fcntl on Windows: there two runs at once are not noticed
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"Expected {path} to be free, but another run is writing to it; wait for it.") from error
