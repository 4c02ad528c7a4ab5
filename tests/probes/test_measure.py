"""The measurement table: its form, padding, sampling, memory, parts, raw values."""

from __future__ import annotations

import warnings

import hypothesis.extra.numpy as hnp
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import probes
from probes.accumulate import COLUMNS, PERCENTILES, Place, Store, summaries
from probes.measure import Watch, watch_batches
from probes.statistics import METRICS


class Model(nn.Module):
    """Two layers of attention under a padding mask, two heads."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(5000, 16)
            self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.embedding.weight.data *= 2

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def batches(count=4, length=9, padded=True):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        mask = torch.ones(3, length, dtype=torch.long)
        if padded:
            mask[0, 5:] = mask[1, 7:] = 0
        ids = torch.randint(5000, (3, length), generator=generator)
        yield {"input_ids": ids, "attention_mask": mask}


SELECTIONS = ["full", "topk:3", "top-p:0.8", "banded:3"]


def same(left, right):
    pd.testing.assert_frame_equal(left.reset_index(drop=True), right.reset_index(drop=True), check_exact=True)


def test_the_table_has_the_agreed_form():
    table = probes.measure(Model(), batches(), SELECTIONS, name="mine")
    assert tuple(table.columns) == COLUMNS
    assert set(table["metric"]) == set(METRICS)
    assert set(table["model"]) == {"mine"}
    assert set(table["error"]) == {"exact"}
    assert table["layer"].dtype == table["head"].dtype == "Int64"
    assert table["count"].dtype == table["undefined"].dtype == "int64"
    assert dict(zip(table["selection"], table["kind"], strict=True)) == {
        "full": "full",
        "topk:3": "heavy-hitter",
        "top-p:0.8": "heavy-hitter",
        "banded:3": "regular",
    }
    calls = table["module"].nunique() - 1
    assert len(table) == len(SELECTIONS) * len(METRICS) * (calls * 3 + 1)
    whole = table[table["scope"] == "model"]
    assert whole["layer"].isna().all()
    assert whole["head"].isna().all()
    assert (whole["module"] == "").all()
    separation = whole[(whole["selection"] == "full") & (whole["metric"] == "separation")].iloc[0]
    assert separation["count"] == 0
    assert separation["undefined"] == 4 * (5 + 7 + 9) * 2 * 2
    assert np.isnan(separation["mean"])


def test_padding_is_excluded_from_queries_and_keys():
    alone = [{"input_ids": b["input_ids"][i : i + 1, :n]} for b in batches() for i, n in enumerate((5, 7, 9))]
    padded = probes.measure(Model(), batches(), ["full", "topk:3", "banded:3"])
    bare = probes.measure(Model(), alone, ["full", "topk:3", "banded:3"])
    numbers = [
        c for c in COLUMNS if c not in ("model", "module", "layer", "head", "scope", "selection", "kind", "metric")
    ]
    assert (padded["count"] == bare["count"]).all()
    assert (padded["undefined"] == bare["undefined"]).all()
    for name in numbers:
        if padded[name].dtype == float:
            np.testing.assert_allclose(padded[name], bare[name], atol=2e-5, rtol=1e-4, err_msg=name)
    everything = probes.measure(Model(), batches(), ["full"], include_padding=True)
    row = everything[(everything["scope"] == "model") & (everything["metric"] == "kept")].iloc[0]
    assert row["count"] == 4 * 27 * 2 * 2


def test_more_keys_asked_for_than_there_are():
    table = probes.measure(Model(), batches(), [probes.TopK(100)])
    rows = table[table["scope"] == "model"].set_index("metric")
    assert rows.loc["separation", "count"] == 0
    assert rows.loc["separation", "undefined"] == rows.loc["dispersion", "count"]
    assert rows.loc["kept", "max"] == 9
    assert rows.loc["tail_mass", "max"] == 0


def test_modes_are_restored_and_inputs_of_every_form_are_taken():
    model = Model().train()
    model.layers[0].eval()
    ids = next(batches())["input_ids"]
    by_name = probes.measure(model, [{"input_ids": ids}])
    same(by_name, probes.measure(model, [ids]))
    same(by_name, probes.measure(model, [(ids,)]))
    same(by_name, probes.measure(model, ids))
    assert model.training
    assert not model.layers[0].training
    with probes.watch(model) as watch:
        model(ids)
    same(by_name, watch.table())


@given(
    st.lists(hnp.arrays(float, st.integers(0, 9), elements=st.sampled_from([0.0, -1.5, 2.0, 7.0, np.nan])), min_size=1)
)
def test_summaries_are_numpys(groups):
    for values, row in zip(groups, summaries(groups), strict=True):
        known = values[~np.isnan(values)]
        assert row["count"] == len(known)
        assert row["undefined"] == len(values) - len(known)
        if len(known):
            expected = [known.mean(), known.std(), known.min(), known.max(), *np.percentile(known, PERCENTILES)]
            got = [row[name] for name in ("mean", "std", "min", "max", *(f"p{p}" for p in PERCENTILES))]
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_percentiles_among_infinities():
    (row,) = summaries([np.array([-np.inf, 1.0, 2.0, np.inf, np.inf])])
    assert (row["min"], row["p50"], row["p99"], row["max"]) == (-np.inf, 2.0, np.inf, np.inf)


@pytest.mark.parametrize("memory", [2**30, 0])
def test_parts_merge_to_the_table_of_one_run(memory):
    def run(shard):
        watching = Watch(Model(), SELECTIONS, queries=0.5, memory=memory)
        watch_batches(Model() if shard is None else model_of(watching), batches(7), watching, shard=shard)
        return watching.store

    def model_of(watching):
        return watching._capture.model

    whole = run((1, 1))
    parts = [Store.restore(run((i, 3)).state()) for i in (1, 2, 3)]
    merged = parts[0]
    for part in parts[1:]:
        merged.merge(part)
    if memory:
        same(merged.table(), whole.table())
    else:
        left, right = merged.table(), whole.table()
        for name in ("count", "undefined", "min", "max"):
            pd.testing.assert_series_equal(left[name], right[name])
        np.testing.assert_allclose(left["mean"], right["mean"], rtol=1e-9, equal_nan=True)
        np.testing.assert_allclose(left["std"], right["std"], rtol=1e-6, atol=1e-9, equal_nan=True)


def test_sketches_keep_their_stated_error_and_exact_extremes():
    generator = np.random.default_rng(0)
    values = generator.standard_exponential((2, 200_000))
    place = Place("m", 0)
    exact, sketched = Store("m", {"full": "full"}), Store("m", {"full": "full"}, memory=1000)
    for store in (exact, sketched):
        for chunk in np.array_split(values, 50, axis=1):
            store.add(place, "full", "kept", list(chunk))
    truth, rough = exact.table(), sketched.table()
    assert set(truth["error"]) == {"exact"}
    assert all("rank within" in error for error in rough["error"])
    stated = float(rough["error"].iloc[0].split()[-1].rstrip("%")) / 100
    for name in ("count", "min", "max"):
        assert (truth[name] == rough[name]).all()
    np.testing.assert_allclose(truth["mean"], rough["mean"], rtol=1e-12)
    np.testing.assert_allclose(truth["std"], rough["std"], rtol=1e-9)
    for head in range(2):
        ordered = np.sort(values[head])
        row = rough[rough["head"] == head].iloc[0]
        for p in PERCENTILES:
            assert abs(np.searchsorted(ordered, row[f"p{p}"]) / len(ordered) - p / 100) <= stated


def test_a_sample_of_queries_estimates_the_whole():
    long = list(batches(6, 64, padded=False))
    whole = probes.measure(Model(), long, ["topk:5"])
    some = probes.measure(Model(), long, ["topk:5"], queries=0.25, seed=1)
    same(some, probes.measure(Model(), long, ["topk:5"], queries=0.25, seed=1))
    assert not some.equals(probes.measure(Model(), long, ["topk:5"], queries=0.25, seed=2))
    pick = lambda t, m: t[(t["scope"] == "model") & (t["metric"] == m)].iloc[0]  # noqa: E731
    assert pick(some, "dispersion")["count"] == pick(whole, "dispersion")["count"] / 4
    assert pick(some, "sink_ratio")["mean"] == pytest.approx(1.0)
    assert pick(some, "attention_received")["mean"] == pytest.approx(pick(whole, "attention_received")["mean"])
    assert pick(some, "dispersion")["p50"] == pytest.approx(pick(whole, "dispersion")["p50"], rel=0.1)


def test_raw_values_are_those_of_the_table(tmp_path):
    table = probes.measure(Model(), batches(), ["full", "topk:3"], raw=tmp_path / "raw")
    raw = pq.read_table(tmp_path / "raw").to_pandas()
    assert len(raw) == 2 * 4 * (5 + 7 + 9) * 2 * 2
    assert {"batch", "sequence", "module", "layer", "head", "query", "selection"} <= set(raw)
    first = table[(table["scope"] == "head") & (table["metric"] == "separation") & (table["selection"] == "topk:3")]
    for _, row in first.iterrows():
        values = raw[(raw["module"] == row["module"]) & (raw["head"] == row["head"]) & (raw["selection"] == "topk:3")][
            "separation"
        ]
        assert len(values) == row["count"]
        assert values.mean() == pytest.approx(row["mean"])
        assert values.max() == row["max"]
    with pytest.raises(ValueError, match="something in it"):
        probes.measure(Model(), batches(), raw=tmp_path / "raw")


def test_nan_logits_are_counted_by_module():
    model = Model()
    model.layers[1].qkv.weight.data[0] = float("nan")
    with pytest.warns(UserWarning, match="NaN logits"):
        table = probes.measure(model, batches(1), ["full", "topk:3"])
    assert list(table.attrs["nan"].values()) == [21 * 1]
    rows = table[(table["metric"] == "dispersion") & (table["scope"] == "model")]
    assert (rows["undefined"] == 21).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queries": 0.0}, "queries"),
        ({"selections": []}, "selections"),
        ({"selections": ["full", "full"]}, "different"),
        ({"selections": ["topk"]}, "topk"),
        ({"selections": ["nothing:3"]}, "known"),
        ({"batches": []}, "at least one batch"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        probes.measure(Model(), **({"batches": batches(), "selections": ["full"]} | given))


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="without any"):
        probes.measure(nn.Linear(3, 3), [torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="convolution"):
        probes.measure(nn.Conv1d(3, 3, 3), [torch.zeros(2, 3, 5)])


def test_plots_can_be_drawn():
    table = probes.measure(Model(), batches(), ["full", "topk:3"])
    for draw in (probes.plots.dispersion, probes.plots.separation, probes.plots.sink_ratio):
        axes = draw(table)
        assert "[" in axes.get_ylabel() or "ratio" in axes.get_ylabel()
        assert draw(table, axes) is axes
    with pytest.raises(ValueError, match="metric"):
        probes.plots.statistic(table, "nonsense")


class Causal(torch.nn.Module):
    """One head that attends to earlier tokens, so that the first queries have fewer keys than any k."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize(("selection", "size"), [("topk:3", 3), ("banded:3", 3), ("full", None), ("topk:9", 6)])
def test_sink_ratio_is_queries_per_key_over_k_also_where_rows_are_short(selection, size):
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = probes.measure(Causal(), [x], selections=[selection], on_missing="warn")
    logits = (x @ x.mT)[0, 0] / 2
    counts, kept_in_all = [0] * 6, 0
    for query in range(6):
        order = sorted(range(query + 1), key=lambda key: -float(logits[query, key]))
        if selection.startswith("topk"):
            kept = order[: int(selection[5:])]
        elif selection == "banded:3":
            kept = list(range(max(0, query - 2), query + 1))
        else:
            kept = order
        kept_in_all += len(kept)
        for key in kept:
            counts[key] += 1
    divisor = size or kept_in_all / 6
    row = table[(table.metric == "sink_ratio") & (table.scope == "head")].iloc[0]
    assert row["max"] == pytest.approx(max(counts) / divisor)
    assert row["mean"] == pytest.approx(sum(counts) / 6 / divisor)
