"""Evaluating chunks of points one after the other, in a pool of processes, on Dask, or on any other executor.

A worker unpacks the model and the data once and keeps them; after that a chunk is a list of coordinates. A pool whose
process dies is started again, and Dask hands a dead worker's chunks to the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stability.errors import UserError
from stability.landscape.directions import Directions
from stability.landscape.evaluate import Evaluator, Point, Values
from stability.landscape.objective import Objective

Chunk = tuple[Values, float]
Todo = Mapping[int, list[Point]]
_RESTARTS = 3
_local = threading.local()


@dataclass(frozen=True)
class Place:
    """Where chunks are evaluated: here, unless one of the three is given.

    Attributes:
        workers: processes on this machine, if more than one.
        executor: any executor.
        scheduler: address of a Dask scheduler.

    Raises:
        UserError: if several are given, or `workers` is below 1.
    """

    workers: int = 1
    executor: Executor | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"Expected `workers` to be at least 1, but got {self.workers}.")
        if (self.workers > 1) + (self.executor is not None) + (self.scheduler is not None) > 1:
            raise UserError(
                "Expected one of `workers`, `executor` and `scheduler`, but got several; leave out the others."
            )

    @property
    def elsewhere(self) -> bool:
        """Whether chunks leave this thread."""
        return self.workers > 1 or self.executor is not None or self.scheduler is not None


@dataclass(frozen=True)
class Job:
    """What there is to do at each point.

    Attributes:
        evaluator: at the centre; used directly where there are no workers.
        directions: the slice.
        method: how points are evaluated.
        threads: of torch, for each worker.
    """

    evaluator: Evaluator
    directions: Directions
    method: str
    threads: int

    def pack(self) -> Parcel:
        """Make the job ready to travel.

        Returns:
            The parcel.

        Raises:
            UserError: if the model, the loss or the data can't be pickled.
        """
        evaluator = self.evaluator
        parts = (evaluator.pristine(), evaluator.objective, self.directions, evaluator.gradient_norm)
        try:
            data = _dumps(parts)
        except Exception as error:
            raise UserError(
                f"Expected a model, loss and batches that can be sent to other processes, but got {error}; "
                "use functions and classes at the top level of a module."
            ) from error
        return Parcel(hashlib.sha256(data).hexdigest(), data, self.method, self.threads, os.getpid())


@dataclass(frozen=True)
class Parcel:
    """A job, packed.

    Attributes:
        key: identifies the contents.
        data: the pickled model, objective, directions and whether gradients are wanted.
        method: how points are evaluated.
        threads: of torch, in the worker.
        home: process that packed it; its number of threads is left alone.
    """

    key: str
    data: bytes
    method: str
    threads: int
    home: int


def evaluate(handle: Parcel | str, points: list[Point]) -> Chunk:
    """Evaluate a chunk in a worker.

    Args:
        handle: the parcel, or the key of one that this worker holds already.
        points: coordinates.

    Returns:
        Values by function, and seconds per point.
    """
    parcel = _installed[handle] if isinstance(handle, str) else handle
    evaluator = _evaluator(parcel)
    with limited_threads(parcel.threads if os.getpid() != parcel.home else None):
        return _timed(evaluator, points, parcel.method)


def run(todo: Todo, job: Job, place: Place) -> Iterator[tuple[int, Chunk]]:
    """Evaluate chunks wherever asked, in whatever order they finish.

    Args:
        todo: points of each chunk by the index of its first point.
        job: what to do at each point.
        place: where.

    Yields:
        Index of the chunk's first point, and its values and seconds.
    """
    if not place.elsewhere or not todo:
        for start, points in todo.items():
            yield start, _timed(job.evaluator, points, job.method)
        return
    parcel = job.pack()
    if place.executor is not None:
        yield from _collect(todo, place.executor, parcel)
    elif place.scheduler is not None:
        address = place.scheduler
        yield from _persist(todo, lambda: _dask(address, parcel))
    else:
        yield from _persist(todo, lambda: _pool(min(place.workers, len(todo)), parcel))


@contextlib.contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Let torch use `count` threads inside the block.

    Args:
        count: how many; None changes nothing.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _timed(evaluator: Evaluator, points: list[Point], method: str) -> Chunk:
    start = time.perf_counter()
    values = evaluator.values(points, method)
    return values, (time.perf_counter() - start) / len(points)


def _collect(todo: Todo, executor: Executor, handle: Any) -> Iterator[tuple[int, Chunk]]:
    futures = {executor.submit(evaluate, handle, points): start for start, points in todo.items()}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


@contextlib.contextmanager
def _pool(workers: int, parcel: Parcel) -> Iterator[tuple[Executor, Any]]:
    # Spawned, not forked: a fork of a process whose torch has already used its threads may hang.
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    # The parcel goes through a file: starting a process would wait until the child has read what is sent to it.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parcel"
        path.write_bytes(pickle.dumps(parcel))
        with ProcessPoolExecutor(workers, context, _install, (path,)) as executor:
            try:
                yield executor, parcel.key
            except BrokenExecutor:
                # A process that was being started when the pool broke is not stopped by the pool, which then waits
                # for it.
                for child in multiprocessing.active_children():
                    if child not in others:
                        child.kill()
                raise


@contextlib.contextmanager
def _dask(address: str, parcel: Parcel) -> Iterator[tuple[Executor, Any]]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise UserError(
            'Expected the package "distributed" for `scheduler`, but got none; install softmax-stability[dask].'
        ) from error
    try:
        client = distributed.Client(address, timeout=5, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(f"Expected a Dask scheduler at {address}, but none answers ({error}).") from error
    with client, client.get_executor(retries=_RESTARTS, pure=False) as executor:
        yield executor, client.scatter(parcel, broadcast=True, hash=False)


def _persist(
    todo: Todo, place: Callable[[], contextlib.AbstractContextManager[tuple[Executor, Any]]]
) -> Iterator[tuple[int, Chunk]]:
    left, failures = dict(todo), 0
    while left:
        try:
            with place() as (executor, handle):
                for start, chunk in _collect(left, executor, handle):
                    del left[start]
                    failures = 0
                    yield start, chunk
        except (BrokenExecutor, CancelledError) as error:
            failures += 1
            if failures > _RESTARTS:
                raise UserError(
                    f"Expected workers that stay alive, but they died {failures} times in a row ({error}); look at "
                    "their memory, and call this under `if __name__ == '__main__':` in a script."
                ) from error


_installed: dict[str, Parcel] = {}


def _install(path: Path) -> None:
    parcel = pickle.loads(path.read_bytes())
    _installed[parcel.key] = parcel
    parent = multiprocessing.parent_process()
    assert parent is not None

    # A worker whose parent was killed would wait for work forever.
    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _evaluator(parcel: Parcel) -> Evaluator:
    # One per thread: an evaluator moves its own copy of the weights.
    if getattr(_local, "key", None) != parcel.key:
        model, objective, directions, gradient_norm = pickle.loads(parcel.data)
        assert isinstance(objective, Objective)
        _local.evaluator = Evaluator(model, objective, directions, gradient_norm=gradient_norm)
        _local.key = parcel.key
    evaluator: Evaluator = _local.evaluator
    return evaluator


def _dumps(value: Any) -> bytes:
    pickler: Any = pickle
    with contextlib.suppress(ImportError):
        # It comes with Dask, and can also send functions that no module holds.
        pickler = importlib.import_module("cloudpickle")
    data: bytes = pickler.dumps(value)
    return data
