"""Workers of every kind give the serial surface, also when one of them is killed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from toy_models import Encoder, Suicidal, pairs

from stability import landscape
from stability.errors import UserError
from stability.landscape.surface import Surface

ARGUMENTS = {"steps": 7, "chunk": 4, "method": "in place", "functions": {"accuracy": landscape.accuracy}}


def serial() -> Surface:
    return landscape.slice(Encoder(), (F.cross_entropy, pairs()), threads=1, **ARGUMENTS)


def same(first: Surface, second: Surface) -> bool:
    return first.frame.drop(columns="seconds").equals(second.frame.drop(columns="seconds"))


def test_thread_pool() -> None:
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(2) as executor:
        surface = landscape.slice(Encoder(), (F.cross_entropy, pairs()), executor=executor, **ARGUMENTS)
    assert same(surface, serial())
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_process_pool_with_a_worker_killed(tmp_path: Path) -> None:
    loss = Suicidal(tmp_path / "killed")
    surface = landscape.slice(Encoder(), (loss, pairs()), workers=2, out=tmp_path / "out", **ARGUMENTS)
    assert loss.flag.exists()
    assert same(surface, serial())


@pytest.mark.slow
def test_dask_cluster_with_a_worker_killed(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    loss = Suicidal(tmp_path / "killed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
    ) as cluster:
        surface = landscape.slice(Encoder(), (loss, pairs()), scheduler=cluster.scheduler_address, **ARGUMENTS)
    assert loss.flag.exists()
    assert same(surface, serial())


def test_no_scheduler_there_is_one_sentence() -> None:
    pytest.importorskip("distributed")
    started = time.monotonic()
    with pytest.raises(UserError, match="Expected a Dask scheduler at"):
        landscape.slice(Encoder(), (F.cross_entropy, pairs()), scheduler="tcp://127.0.0.1:9", steps=3)
    assert time.monotonic() - started < 60


def test_loss_that_cannot_travel_is_one_sentence() -> None:
    lock = threading.Lock()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return F.cross_entropy(output, target)

    with pytest.raises(UserError, match="can be sent to other processes"):
        landscape.slice(Encoder(), (loss, pairs()), workers=2, steps=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "at least 1"),
        ({"workers": 2, "scheduler": "tcp://x:1"}, "one of `workers`, `executor` and `scheduler`"),
    ],
)
def test_mistakes(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        landscape.slice(Encoder(), (F.cross_entropy, pairs()), **arguments)
