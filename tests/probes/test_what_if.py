"""The what-if table against plain loops, and the effect of a selection against a hand-masked model."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from torch import nn

import theory
from probes import measure, selection_plots
from probes.attend import attend
from probes.effect import effect, supervised
from probes.selection import parse
from probes.what_if import COLUMNS, input_condition, parameter_condition, what_if

SELECTIONS = (
    "topk:3",
    "top-p:0.7",
    "banded:3",
    "moba:3:2",
    "quest:2:2",
    "random-k:3",
    "observed",
    "topk:2+sink:1",
    "topk:50",
)


class Layer(nn.Module):
    def __init__(self, selection=None):
        super().__init__()
        self.qkv, self.selection = nn.Linear(8, 24), selection

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        allowed = attention_mask.bool()[:, None, None].expand(-1, 1, x.shape[1], -1)
        if self.selection:
            out = attend(q, k, v, parse(self.selection), allowed=allowed)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, selection=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(selection), Layer(selection)])

    def forward(self, x, attention_mask):
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


def batches():
    generator = torch.Generator().manual_seed(5)
    out = []
    for length in (7, 9):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 3 :] = 0
        out.append({"x": torch.randn(2, length, 8, generator=generator) * 3, "attention_mask": mask})
    return out


def percentile(values, q):
    known = sorted(v for v in values if not math.isnan(v))
    return float(np.percentile(known, q)) if known else math.nan


def slow(name, layer_index, heads, q):
    """One row of the table, by loops over single queries."""
    from probes import capture

    model = Model()
    total = {"kept": 0, "allowed": 0, "change": 0.0, "size": 0.0}
    spread, full_spread, gap, sinks, tail, bound = [], [], [], [], [], []
    for batch in batches():
        with torch.no_grad(), capture(model) as calls:
            model(**batch)
        call = calls[layer_index]
        logits, allowed = call.logits().double(), call.allowed()
        kept = parse(name).keep(call.logits(), allowed, call=call)
        for b in range(len(batch["x"])):
            for h in heads:
                rows = [i for i in range(call.shape[2]) if batch["attention_mask"][b, i]]
                mean_kept = sum(int(kept[b, h, i].sum()) for i in rows) / len(rows)
                sinks.extend(sum(bool(kept[b, h, i, j]) for i in rows) / mean_kept for j in rows)
                for i in rows:
                    z = logits[b, h, i].tolist()
                    keys = [j for j in range(len(z)) if allowed[b, h, i, j]]
                    mine = [j for j in keys if kept[b, h, i, j]]
                    rest = [j for j in keys if j not in mine]
                    total["kept"] += len(mine)
                    total["allowed"] += len(keys)
                    spread.append(max(z[j] for j in mine) - min(z[j] for j in mine))
                    full_spread.append(max(z[j] for j in keys) - min(z[j] for j in keys))
                    delta = min(z[j] for j in mine) - max(z[j] for j in rest) if rest else math.nan
                    gap.append(delta)
                    norm = sum(math.exp(z[j]) for j in keys)
                    tail.append(sum(math.exp(z[j]) for j in rest) / norm)
                    bound.append(1 / (1 + len(mine) / len(rest) * math.exp(delta)) if rest else 0.0)
                    v = call.value[b, h].double()
                    whole = sum(math.exp(z[j]) / norm * v[j] for j in keys)
                    own = sum(math.exp(z[j]) for j in mine)
                    part = sum(math.exp(z[j]) / own * v[j] for j in mine)
                    total["change"] += float(((whole - part) ** 2).sum())
                    total["size"] += float((whole**2).sum())
    return {
        "kept_share": total["kept"] / total["allowed"], "dispersion": percentile(spread, q),
        "dispersion_full": percentile(full_spread, q), "separation": percentile(gap, 100 - q),
        "sink_ratio": percentile(sinks, q), "tail_mass": sum(tail) / len(tail),
        "tail_mass_bound": sum(bound) / len(bound),
        "output_error": math.sqrt(total["change"] / total["size"]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def table():
    return what_if(Model(), batches(), SELECTIONS, percentile=75)


def row(table, **where):
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1
    return table.iloc[0]


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_number_equals_a_plain_loop(table, name):
    expected = slow(name, 1, [1], 75)
    found = row(table, scope="head", module="layers.1", head=1, selection=name)
    for column, value in expected.items():
        assert found[column] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), column
    pooled = slow(name, 0, [0, 1], 75)
    found = row(table, scope="layer", module="layers.0", selection=name)
    for column, value in pooled.items():
        assert found[column] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), column


@pytest.mark.parametrize("q", [50, 100])
def test_percentiles(q):
    table = what_if(Model(), batches(), ["topk:3"], percentile=q)
    found, expected = row(table, scope="head", module="layers.0", head=0, selection="topk:3"), slow("topk:3", 0, [0], q)
    for column, value in expected.items():
        assert found[column] == pytest.approx(value, rel=1e-4, abs=1e-6), column


def test_columns_theorems_and_verdicts(table):
    assert list(table.columns) == list(COLUMNS)
    assert len(table) == (2 * 2 + 2 + 1) * (len(SELECTIONS) + 1)
    theorems = table.groupby("selection")["theorem"].unique().str.join("").to_dict()
    assert theorems == {
        "full": "Theorem 3", "observed": "Theorem 3", "topk:3": "Theorem 5", "topk:50": "Theorem 5",
        "top-p:0.7": "Theorem 5",
        "banded:3": "Theorem 4", "moba:3:2": "no theorem", "quest:2:2": "no theorem", "random-k:3": "no theorem",
        "topk:2+sink:1": "no theorem",
    }  # fmt: skip
    none = table[table["theorem"] == "no theorem"]
    assert set(none["verdict"]) == {"no theorem"}
    assert none[["parameter_condition", "input_condition"]].isna().all(axis=None)
    assert set(table.loc[table["theorem"] == "Theorem 3", "verdict"]) == {"reference"}
    assert set(table.loc[table["selection"] == "topk:50", "verdict"]) == {"undefined"}  # nothing is left out
    banded = table[table["selection"] == "banded:3"]
    assert ((banded["verdict"] == "holds") == (banded["dispersion"] <= banded["dispersion_full"])).all()
    assert (table["tail_mass"] <= table["tail_mass_bound"] + 1e-9).all()


def test_verdicts_are_those_of_theory_on_the_same_measurements(table):
    measured = measure(Model(), batches(), ["full", "topk:3"])
    verdicts = theory.compare(full=measured, heavy_hitter=measured, percentiles=[75])
    mine = table[table["selection"] == "topk:3"]
    for condition in ("parameter", "input"):
        theirs = verdicts[verdicts["condition"] == condition]
        both = mine.merge(theirs, on=["scope", "module", "layer", "head"], suffixes=("", "_theory"))
        assert len(both) == len(mine) == 7
        assert np.allclose(both[f"{condition}_condition"], both["left_hand_side"], rtol=1e-12)
        assert (both[f"verdict_{condition}"] == both["verdict_theory"]).all()


def test_conditions_are_those_of_theory():
    generator = np.random.default_rng(0)
    full, kept, gap = generator.uniform(0.1, 90, (3, 200))
    gap *= 10.0 ** generator.uniform(-9, 0, 200)
    beta = generator.uniform(0.2, 200, 200)
    ours, theirs = (
        parameter_condition(full, kept, gap),
        theory.comparison.parameter_condition(dispersion_full=full, dispersion=kept, separation=gap),
    )
    assert np.allclose(ours, theirs, rtol=1e-12)
    theirs = theory.comparison.input_condition(dispersion_full=full, dispersion=kept, separation=gap, sink_ratio=beta)
    assert np.allclose(input_condition(full, kept, gap, beta), theirs, rtol=1e-12)
    assert parameter_condition(8.61, 3.51, 0.016) == pytest.approx(0.970289, abs=1e-6)  # the published row
    assert parameter_condition(2.0, 1.0, 0.0) == math.inf


def test_a_separation_of_rounding_noise_gets_no_verdict():
    model = Model()
    tokens = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 1)
    batch = {"x": tokens, "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    table = what_if(model, [batch], ["topk:3"])  # every key has a twin
    assert set(table.loc[table["selection"] == "topk:3", "verdict"]) == {"limited by precision"}


def test_observed_takes_the_theorem_of_the_layers_own_selection():
    table = what_if(Model("topk:3"), batches(), ["observed", "topk:3"])
    observed, own = (table[table["selection"] == name].reset_index(drop=True) for name in ("observed", "topk:3"))
    assert set(observed["theorem"]) == {"Theorem 5"}
    columns = ["kept_share", "dispersion", "separation", "sink_ratio", "tail_mass", "output_error", "verdict"]
    pd.testing.assert_frame_equal(observed[columns], own[columns])


def test_wrong_arguments():
    with pytest.raises(ValueError, match="at least one selection"):
        what_if(Model(), batches(), [])
    with pytest.raises(ValueError, match="Expected `percentile` among"):
        what_if(Model(), batches(), ["topk:2"], percentile=42)
    with pytest.raises(ValueError, match="at least one batch"):
        what_if(Model(), [], ["topk:2"])
    with pytest.raises(ValueError, match="Did you mean"):
        what_if(Model(), batches(), ["topkk:2"])


def test_figures(table):
    ax = selection_plots.frontier(table)
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [n for n in SELECTIONS if n != "observed"]
    share, tail = ax.collections[0].get_offsets()[0]
    model_row = row(table, scope="model", selection="topk:3")
    assert (share, tail) == pytest.approx((model_row["kept_share"], model_row["tail_mass"]))
    ax = selection_plots.by_layer(table, selections=["full", "topk:3"])
    line = ax.get_lines()[1].get_ydata()
    assert list(line) == [
        row(table, scope="layer", module=f"layers.{n}", selection="topk:3")["dispersion"] for n in (0, 1)
    ]
    assert "nats" in ax.get_ylabel()
    ax = selection_plots.heat_map(table, "topk:3")
    grid = ax.images[0].get_array()
    assert grid.shape == (2, 2)
    assert grid[1, 0] == row(table, scope="head", module="layers.1", head=0, selection="topk:3")["dispersion"]
    own = plt.subplots()[1]
    assert selection_plots.heat_map(table, "topk:3", column="tail_mass", ax=own) is own
    with pytest.raises(ValueError, match="Expected rows"):
        selection_plots.heat_map(table, "topk:4")
    with pytest.raises(ValueError, match="lacks the columns"):
        selection_plots.frontier(table.drop(columns="tail_mass"))
    plt.close("all")


def test_effect_on_a_language_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50, initializer_range=0.3)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    table = effect(model, [batch], ["full", "topk:2", "hardmax"]).set_index("selection")
    assert model.training
    model.eval()
    with torch.no_grad():
        output = model(**batch)
    assert table.loc["as it is", "loss"] == pytest.approx(float(output.loss), rel=1e-5)
    assert table.loc["as it is", "perplexity"] == pytest.approx(math.exp(output.loss), rel=1e-5)
    right = (output.logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
    assert table.loc["as it is", "accuracy"] == pytest.approx(float(right))
    assert (table.loc["full", ["loss_change", "accuracy_change", "output_change"]] == 0).all()
    assert table.loc["topk:2", "loss_change"] == pytest.approx(table.loc["topk:2", "loss"] - table.loc["full", "loss"])
    assert table.loc["hardmax", "output_change"] > table.loc["topk:2", "output_change"] > 0


def test_effect_with_labels_beside_the_batches():
    model, given = Model(), batches()
    labels = [torch.randint(0, 8, batch["x"].shape[:2], generator=torch.Generator().manual_seed(0)) for batch in given]
    labels = [
        wanted.masked_fill(batch["attention_mask"] == 0, -100) for wanted, batch in zip(labels, given, strict=True)
    ]
    table = effect(model, given, ["topk:1"], labels=labels)
    with torch.no_grad():
        outputs = [model(**batch) for batch in given]
    losses = torch.cat([
        F.cross_entropy(out.transpose(1, 2), wanted, reduction="none")[wanted != -100]
        for out, wanted in zip(outputs, labels, strict=True)
    ])  # fmt: skip
    assert table.loc[0, "loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    scored = effect(model, given, "topk:1", score=lambda output, batch: {"size": output.abs()})
    assert scored.loc[0, "size"] == pytest.approx(
        float(torch.cat([o.abs().flatten() for o in outputs]).mean()), rel=1e-5
    )
    assert next(iter(scored["size_change"])) == 0
    with pytest.raises(ValueError, match="labels for each"):
        effect(model, given, ["topk:1"], labels=labels[:1])
    with pytest.raises(ValueError, match="at least one batch"):
        effect(model, [], ["topk:1"])


def test_labels_of_another_shape():
    with pytest.raises(ValueError, match="Expected labels of shape"):
        supervised(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))


def test_class_labels():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    values = supervised(logits, torch.tensor([0, 0, 1]))
    assert values["accuracy"].tolist() == [1.0, 0.0, 1.0]
    assert values["loss"].tolist() == pytest.approx(
        [math.log1p(math.exp(-2)), math.log1p(math.exp(1)), math.log1p(math.exp(-3))]
    )
