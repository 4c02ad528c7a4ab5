"""Resuming: after any crash the surface is the same, and nobody else's log is gone on with."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy_models import Encoder, Quadratic, own_loss, pairs

from stability import landscape
from stability.errors import UserError
from stability.landscape.evaluate import Plan
from stability.landscape.store import LOG, Store

IDENTITY = {
    **{"model": "m", "data": "d", "directions": "r", "points": "p", "reduction": "mean"},
    **{"functions": ["loss"], "center": {"loss": 1.0}},
}


def test_log_gives_back_what_was_added_bit_for_bit(tmp_path: Path) -> None:
    values = {"loss": [0.1 + 0.2, float("nan"), float("inf"), -float("inf"), 5e-324]}
    with Store(tmp_path, IDENTITY, Plan("in place", 5)) as store:
        store.add(0, values, 0.25)
    with Store(tmp_path, IDENTITY, Plan("vmap", 9)) as store:
        assert store.plan == Plan("in place", 5)
        np.testing.assert_array_equal(store.chunks[0][0]["loss"], values["loss"])
        assert store.chunks[0][1] == 0.25


def test_log_cut_at_every_byte_loses_the_cut_chunk_only(tmp_path: Path) -> None:
    with Store(tmp_path, IDENTITY, Plan("in place", 1)) as store:
        header = store.path.stat().st_size
        store.add(0, {"loss": [1.0]}, 0.0)
        first = store.path.stat().st_size
        store.add(1, {"loss": [2.0]}, 0.0)
    whole = store.path.read_bytes()
    for end in range(len(whole) + 1):
        store.path.write_bytes(whole[:end])
        with Store(tmp_path, IDENTITY, Plan("in place", 1)) as again:
            assert sorted(again.chunks) == list(range((end >= first) + (end == len(whole))))
            again.add(7, {"loss": [3.0]}, 0.0)
        with Store(tmp_path, IDENTITY, Plan("in place", 1)) as again:
            assert 7 in again.chunks
    assert header < first


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("model", "x", "model"),
        ("data", "x", "data"),
        ("directions", "x", "directions"),
        ("points", "x", "grid"),
        ("functions", ["loss", "accuracy"], "set of functions"),
        ("center", {"loss": 1.1}, "loss or data"),
    ],
)
def test_another_subject_is_refused(tmp_path: Path, key: str, value: object, word: str) -> None:
    with Store(tmp_path, IDENTITY, Plan("in place", 1)) as store:
        store.add(0, {"loss": [1.0]}, 0.0)
    before = store.path.read_bytes()
    with pytest.raises(UserError, match=f"different {word}"):
        Store(tmp_path, {**IDENTITY, key: value}, Plan("in place", 1))
    assert store.path.read_bytes() == before
    with Store(tmp_path, {**IDENTITY, key: value}, Plan("in place", 1), force=True) as store:
        assert store.chunks == {}


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with Store(tmp_path, IDENTITY, Plan("in place", 1)), pytest.raises(UserError, match="another run is writing"):
        Store(tmp_path, IDENTITY, Plan("in place", 1))


def test_surface_without_log_is_not_overwritten(tmp_path: Path) -> None:
    landscape.slice(Quadratic(), own_loss, steps=3, out=tmp_path)
    (tmp_path / LOG).unlink()
    with pytest.raises(UserError, match="exists already"):
        landscape.slice(Quadratic(), own_loss, steps=3, out=tmp_path)
    landscape.slice(Quadratic(), own_loss, steps=3, out=tmp_path, force=True)


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a writable folder"):
        landscape.slice(Quadratic(), own_loss, steps=3, out=tmp_path / "file" / "folder")


def half(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) / 2


def test_slice_refuses_other_model_data_directions_and_loss(tmp_path: Path) -> None:
    arguments = {"steps": 3, "out": tmp_path}
    landscape.slice(Encoder(), (F.cross_entropy, pairs()), **arguments)
    with pytest.raises(UserError, match="different model"):
        landscape.slice(Encoder(seed=1), (F.cross_entropy, pairs()), **arguments)
    with pytest.raises(UserError, match="different data"):
        landscape.slice(Encoder(), (F.cross_entropy, pairs(seed=2)), **arguments)
    with pytest.raises(UserError, match="different directions"):
        landscape.slice(Encoder(), (F.cross_entropy, pairs()), seed=1, **arguments)
    with pytest.raises(UserError, match="different grid"):
        landscape.slice(Encoder(), (F.cross_entropy, pairs()), steps=5, out=tmp_path)
    with pytest.raises(UserError, match="different loss or data"):
        landscape.slice(Encoder(), (half, pairs()), **arguments)


def test_finished_chunks_are_not_evaluated_again_and_directions_are_saved(tmp_path: Path) -> None:
    model, calls = Quadratic(), []

    def loss(quadratic: torch.nn.Module) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return own_loss(quadratic)

    with pytest.raises(KeyboardInterrupt):
        landscape.slice(model, loss, steps=5, chunk=2, out=tmp_path)
    done = len((tmp_path / LOG).read_bytes().splitlines()) - 1
    calls = []
    surface = landscape.slice(model, lambda m: (calls.append(1), own_loss(m))[1], steps=5, chunk=2, out=tmp_path)
    assert len(calls) < 20
    assert done * 2 + len(calls) - 3 == 25  # two evaluations of the centre and one for timing
    plain = landscape.slice(model, own_loss, steps=5)
    assert surface.frame.drop(columns="seconds").equals(plain.frame.drop(columns="seconds"))
    saved = landscape.Directions.read(tmp_path / "directions.safetensors")
    assert saved.fingerprint() == landscape.directions.gaussian(model).fingerprint()
    assert landscape.Surface.read(tmp_path / "surface.parquet").frame.equals(surface.frame)


SCRIPT = """
import sys, time, torch
sys.path.insert(0, {folder!r})
from toy_models import Encoder, pairs
from stability import landscape

def slow(output, target):
    time.sleep(0.002)
    return torch.nn.functional.cross_entropy(output, target)

if __name__ == "__main__":
    torch.set_num_threads(1)
    options = dict(out=sys.argv[1], workers=int(sys.argv[2]))
    landscape.slice(Encoder(), (slow, pairs()), steps=9, chunk=3, method="in place", **options)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_times_the_surface_is_identical(tmp_path: Path, workers: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    out, generator = tmp_path / "out", random.Random(workers)
    log = out / LOG

    def size() -> int:
        return log.stat().st_size if log.exists() else 0

    last = 3 if workers == 1 else 1
    for kills in range(last + 1):
        process = subprocess.Popen(
            [sys.executable, str(script), str(out), str(workers)], stderr=subprocess.PIPE, text=True
        )
        before, moment = size(), generator.random() * 0.15
        while kills < last and process.poll() is None and size() <= before:
            time.sleep(0.002)
        if kills < last:
            time.sleep(moment)
            process.kill()
        _, errors = process.communicate()
        assert process.returncode == (0 if kills == last else -signal.SIGKILL), errors
    surface = landscape.Surface.read(out / "surface.parquet")
    plain = landscape.slice(Encoder(), (F.cross_entropy, pairs()), steps=9, method="in place", threads=1)
    assert surface.frame.drop(columns="seconds").equals(plain.frame.drop(columns="seconds"))
