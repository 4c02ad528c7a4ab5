"""`theory.compare` on measurement tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import theory
from theory import comparison

STATISTICS = ["mean", "std", "min", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max"]
PLACES = [("model", "", None, None), ("layer", "a.0", 0, None), ("head", "a.0", 0, 0), ("head", "a.0", 0, 1)]
QUANTITIES = ["dispersion_full", "dispersion", "separation", "sink_ratio"]


def measured(kind, metrics, places=PLACES, selection=None):
    """A measurement table with the same statistics at every place."""
    rows = [
        {
            "model": "m",
            "module": module,
            "layer": layer,
            "head": head,
            "scope": scope,
            "selection": selection or {"full": "full", "heavy-hitter": "topk:5"}.get(kind, kind),
            "kind": kind,
            "keys": 5.0,
            "metric": metric,
            "count": 10,
            "undefined": 0,
            **{name: values.get(name, np.nan) for name in STATISTICS},
            "error": "exact",
        }
        for scope, module, layer, head in places
        for metric, values in metrics.items()
    ]
    return pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"})


FULL = {"dispersion": {"p75": 8.61, "p90": 18.5, "p95": 29.4, "max": 87.8}}
SPARSE = {
    "dispersion": {"p75": 3.51, "p90": 6.74, "p95": 9.67, "max": 28.2},
    "separation": {"p25": 0.016, "p10": 0.005, "p5": 0.002, "min": 1e-9},
    "sink_ratio": {"p75": 0.2, "p90": 0.6, "p95": 3.0, "max": 119.6},
}


@pytest.fixture
def pair():
    return measured("full", FULL), measured("heavy-hitter", SPARSE)


def test_published_table(pair):
    verdicts = theory.compare(full=pair[0], heavy_hitter=pair[1])
    assert len(verdicts) == len(PLACES) * 4 * 2
    model = verdicts[verdicts.scope == "model"]
    assert list(model.percentile) == [75, 75, 90, 90, 95, 95, 100, 100]
    assert list(model.condition) == ["parameter", "input"] * 4
    expected = [0.970289, 0.898233, 0.688457, 0.673555, 0.563937, 0.586378, 0.565107, 0.611668]
    np.testing.assert_allclose(model.left_hand_side, expected, atol=6e-7)
    assert list(model.verdict) == ["holds"] * 6 + ["limited by precision"] * 2
    np.testing.assert_allclose(verdicts.margin, verdicts.right_hand_side - verdicts.left_hand_side)
    assert set(verdicts.scope) == {"model", "layer", "head"}
    for (_, module, layer, head), rows in verdicts.groupby(["scope", "module", "layer", "head"], dropna=False):
        assert len(rows) == 8, (module, layer, head)


def test_failing_pair_says_so():
    full = measured("full", {"dispersion": {"p75": 2.03}})
    sparse = measured(
        "heavy-hitter", {"dispersion": {"p75": 1.03}, "separation": {"p25": 0.009}, "sink_ratio": {"p75": 1.2}}
    )
    verdicts = theory.compare(full=full, heavy_hitter=sparse, percentiles=[75])
    assert set(verdicts.verdict) == {"fails"}
    assert verdicts.words.str.contains("above that of full attention").all()


def test_flips_put_the_left_hand_side_at_one(pair):
    verdicts = theory.compare(full=pair[0], heavy_hitter=pair[1])
    checked = 0
    for row in verdicts.to_dict("records"):
        for name in QUANTITIES:
            if np.isnan(row[f"flip_{name}"]):
                continue
            values = {quantity: row[quantity] for quantity in QUANTITIES} | {name: row[f"flip_{name}"]}
            if row["condition"] == "parameter":
                values.pop("sink_ratio")
            left = getattr(comparison, f"{row['condition']}_condition")(**values)
            assert left == pytest.approx(1, abs=1e-9)
            checked += 1
    assert checked >= 7 * len(verdicts) / 2
    chosen = verdicts.to_dict("records")[0]
    assert chosen["flip_from"] + chosen["flip_change"] == pytest.approx(chosen["flip_to"])
    efforts = {name: abs(np.log(chosen[f"flip_{name}"] / chosen[name])) for name in QUANTITIES[:3]}
    assert chosen["flip_quantity"] == min(efforts, key=efforts.get)


@pytest.mark.parametrize("separation", [0.0, 3e-8])
def test_separation_at_the_float_resolution_is_never_a_plain_verdict(pair, separation):
    sparse = measured("heavy-hitter", {**SPARSE, "separation": {"p25": separation}})
    verdicts = theory.compare(full=pair[0], heavy_hitter=sparse, percentiles=[75])
    assert set(verdicts.verdict) == {"limited by precision"}


def test_resolution_follows_the_largest_logit(pair):
    logits = {"max_abs_logit": {"max": 4e5}}
    sparse = measured("heavy-hitter", {**SPARSE, **logits})
    verdicts = theory.compare(full=pair[0], heavy_hitter=sparse, percentiles=[75])
    assert verdicts.resolution.to_numpy() == pytest.approx(4e5 * 2**-23)
    assert set(verdicts.verdict) == {"limited by precision"}


def test_undefined_separation(pair):
    sparse = measured("heavy-hitter", {**SPARSE, "separation": {}})
    verdicts = theory.compare(full=pair[0], heavy_hitter=sparse)
    assert set(verdicts.verdict) == {"undefined"}
    assert verdicts.words.str.contains("separation is undefined").all()


def test_rows_of_another_kind_are_left_aside(pair):
    mixed = pd.concat(pair, ignore_index=True)
    alone = theory.compare(full=pair[0], heavy_hitter=pair[1])
    pd.testing.assert_frame_equal(theory.compare(full=mixed, heavy_hitter=mixed), alone)


def test_a_head_that_only_one_table_has_is_left_out(pair):
    verdicts = theory.compare(full=pair[0][pair[0]["head"].fillna(0) == 0], heavy_hitter=pair[1])
    assert verdicts["head"].dropna().unique().tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda full, sparse: (full.drop(columns="p75"), sparse), "`full`.*lacks the columns p75"),
        (lambda full, sparse: (full, sparse.drop(columns=["kind", "metric"])), "`heavy_hitter`.*kind, metric"),
        (lambda full, sparse: (sparse, full), "`full` to hold a selection of kind 'full', but it holds heavy-hitter"),
        (
            lambda full, sparse: (full, pd.concat([sparse, sparse.assign(selection="topk:9")])),
            "one selection of kind 'heavy-hitter'.*topk:5, topk:9",
        ),
        (lambda full, sparse: (full, sparse[sparse.metric != "sink_ratio"]), "got no sink_ratio"),
        (lambda full, sparse: (full, sparse.assign(module="b", scope="head")), "head"),
        (lambda full, sparse: (full[full.scope == "head"], sparse[sparse.scope == "model"]), "none match"),
        (lambda full, sparse: (full, pd.concat([sparse, sparse])), "twice"),
        (lambda full, sparse: (full.head(0), sparse), "holds nothing"),
        (lambda full, sparse: ("table.parquet", sparse), "`full` to be a measurement table.*str"),
    ],
)
def test_refusals(pair, change, message):
    full, sparse = change(*pair)
    with pytest.raises(ValueError, match=message):
        theory.compare(full=full, heavy_hitter=sparse)


def test_unknown_percentile(pair):
    with pytest.raises(ValueError, match=r"among 50, 75, 90, 95, 99, 100, but got \[80\]"):
        theory.compare(full=pair[0], heavy_hitter=pair[1], percentiles=[80])
