from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from stability import files
from stability.errors import UserError


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    target = tmp_path / "table.txt"
    target.write_text("old")

    def stop_half_way() -> None:
        with files.atomic_write(target) as temporary:
            temporary.write_text("ne")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        stop_half_way()
    assert target.read_text() == "old"
    assert contents(tmp_path) == ["table.txt"]


def test_a_written_file_has_ordinary_permissions(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        with files.atomic_write(tmp_path / "a" / "b.txt") as temporary:
            temporary.write_text("text")
    finally:
        os.umask(old)
    assert (tmp_path / "a" / "b.txt").stat().st_mode & 0o777 == 0o644


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "run"

    def stop_half_way() -> None:
        with files.atomic_folder(target) as temporary:
            (temporary / "half.txt").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    assert contents(tmp_path) == []
    with files.atomic_folder(target) as temporary:
        (temporary / "whole.txt").write_text("whole")
    assert contents(target) == ["whole.txt"]


def test_an_existing_folder_is_replaced_only_with_force(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "old.txt").write_text("old")
    with pytest.raises(UserError, match="exists already; give --force"), files.atomic_folder(target):
        pytest.fail("the block must not run")
    assert contents(target) == ["old.txt"]
    with files.atomic_folder(target, force=True) as temporary:
        (temporary / "new.txt").write_text("new")
    assert contents(target) == ["new.txt"]


def test_a_folder_under_a_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Expected a writable folder"), files.atomic_write(tmp_path / "file" / "x"):
        pytest.fail("the block must not run")


def test_a_table_comes_back_with_its_provenance(tmp_path: Path) -> None:
    frame = pd.DataFrame({"layer": pd.array([1, None], dtype="Int64"), "mean": [0.1, float("nan")], "name": ["a", ""]})
    path = files.write_table(frame, tmp_path / "t.parquet", seed=7)
    back = files.read_table(path, columns=["layer", "mean"])
    pd.testing.assert_frame_equal(back, frame)
    assert back.attrs["provenance"]["seed"] == 7
    assert set(back.attrs["provenance"]) == {"command", "time", "versions", "seed"}
    assert "torch" in back.attrs["provenance"]["versions"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (None, "there is no such file"),
        (b"PAR1 not really", "can't be read as one"),
        (b"", "can't be read as one"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, write: bytes | None, message: str) -> None:
    path = tmp_path / "t.parquet"
    if write is not None:
        path.write_bytes(write)
    with pytest.raises(UserError, match=message):
        files.read_table(path)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = files.write_table(pd.DataFrame({"a": [1]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="it lacks b, c; it has a"):
        files.read_table(path, columns=["a", "b", "c"])
