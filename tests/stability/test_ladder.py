"""The ladder: its rungs are in order, and its derivatives right, on made layers and on captured ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import probes
import theory
from stability.ladder import RUNGS, bounds, jacobian_sums, ladder, plot_ladder
from stability.layer import Layer
from stability.model import Encoder, EncoderConfig


def made(seed, kind="full", length=7, dim=4, scale=1.0, **extra):
    generator = torch.Generator().manual_seed(seed)
    tokens, score, value = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((length, dim), (dim, dim), (3, dim))
    )
    score = scale * score
    logits = (tokens @ score.T @ tokens.T)[None, None]
    allowed = torch.ones_like(logits, dtype=torch.bool)
    selection = {"full": probes.Full(), "heavy-hitter": probes.TopK(3), "regular": probes.parse("banded:3")}.get(kind)
    kept = allowed.tril() if selection is None else selection.keep(logits, allowed)
    return Layer(tokens, score, value, kept[0, 0], kind, "made", seed, 0, **extra)


def slow_output(layer, tokens):
    """Attention by a plain loop over queries."""
    rows = []
    for query in range(len(tokens)):
        keys = [key for key in range(len(tokens)) if layer.kept[query, key]]
        logits = np.array([float(tokens[key] @ layer.score @ tokens[query]) for key in keys])
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        rows.append(sum(w * (layer.value @ tokens[key]) for w, key in zip(weights, keys, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["full", "regular", "heavy-hitter", "masked"])
def test_output_and_jacobian_against_loops_and_finite_differences(kind):
    layer = made(1, kind)
    torch.testing.assert_close(layer.output(layer.tokens), slow_output(layer, layer.tokens))
    sums, directions = jacobian_sums(layer)
    length, dim = layer.tokens.shape
    for key in range(length):
        columns = []
        for axis in range(dim):
            step = torch.zeros(length, dim, dtype=torch.float64)
            step[key, axis] = 1e-6
            columns.append((slow_output(layer, layer.tokens + step) - slow_output(layer, layer.tokens - step)) / 2e-6)
        blocks = torch.stack(columns, -1).numpy()  # (query, out, dim)
        assert sums[key].item() == pytest.approx(sum(np.linalg.norm(block, 2) for block in blocks), rel=1e-6)
    torch.testing.assert_close(directions.norm(dim=-1), torch.ones(length, 2, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["full", "regular", "heavy-hitter", "masked", "input-dependent"])
def test_rungs_are_in_order(kind):
    for seed in range(8):
        table = ladder(made(seed, kind, scale=(0.1, 1.0, 5.0)[seed % 3]), seed=seed)
        rigorous = table[table.rung != "published"]
        assert list(rigorous.rung) == [rung for rung in RUNGS if rung in set(rigorous.rung)]
        values = rigorous.value.to_numpy()
        assert (values > 0).all()
        assert (values[:-1] <= values[1:] * (1 + 1e-7)).all(), table
        assert set(table.rung) >= {"finite difference", "Jacobian blocks", "measured attention"}
        assert ("published" in set(table.rung)) == (kind in {"full", "regular", "heavy-hitter"})
        assert ("sharp" in set(table.rung)) == (kind != "input-dependent")
        assert values[0] > 0.3 * values[1]  # the search is not idle


def test_sharp_and_published_are_the_theorems():
    layer = made(2)
    known = layer.quantities()
    names = ("dispersion", "keys", "token_norm", "score_norm", "value_norm")
    values = {name: known[name] for name in names}
    found = bounds(layer)
    assert found["published"] == pytest.approx(theory.full.input_stability(**values))
    # Every query has its own dispersion; the largest is what the theorem takes.
    assert found["sharp"] == pytest.approx(theory.full.sharp.input_stability(**values))
    layer = made(2, "heavy-hitter")
    known = layer.quantities()
    values = {name: known[name] for name in (*names, "separation", "sink_ratio")}
    assert bounds(layer)["sharp"] == pytest.approx(theory.heavy_hitter.sharp.input_stability(**values))
    assert bounds(layer)["published"] == pytest.approx(theory.heavy_hitter.input_stability(**values))


def test_the_counterexample_is_flagged():
    tokens = torch.where(torch.arange(40)[:, None] < 10, torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]]))
    score = 100 * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    table = ladder(Layer(tokens, score, torch.eye(2), torch.ones(40, 40, dtype=torch.bool))).set_index("rung")
    assert table.value["published"] == pytest.approx(201.0)
    assert table.value["sharp"] == pytest.approx(296.0)
    assert table.value["finite difference"] == pytest.approx(225.003, rel=1e-5)
    assert table.flag["published"].startswith("below finite difference, Jacobian blocks")
    assert (table.flag.drop("published") == "").all()


def test_ties_have_no_finite_sharp_bound():
    tokens = torch.ones(4, 2, dtype=torch.float64)
    kept = torch.tensor([[True, True, False, False]]).expand(4, 4)
    table = ladder(Layer(tokens, torch.eye(2), torch.eye(2), kept, "heavy-hitter")).set_index("rung")
    assert np.isinf(table.value["sharp"])
    assert np.isinf(table.log10["published"])
    assert np.isfinite(table.value["sharp, sets held"])


def encoder(attention, **settings):
    model = Encoder(EncoderConfig(tokens=6, classes=2, width=8, hidden=8, blocks=2, attention=attention, **settings))
    tokens = torch.randint(0, 6, (1, 8), generator=torch.Generator().manual_seed(3))
    return model.eval(), tokens


@pytest.mark.parametrize("attention", ["full", "topk:3"])
def test_captured_calls(attention):
    model, tokens = encoder(attention, heads=2)
    with torch.no_grad(), probes.capture(model) as calls:
        model(tokens)
    assert len(calls) == 2
    layer = Layer.from_call(calls[1], head=1)
    assert layer.kind == {"full": "full", "topk:3": "heavy-hitter"}[attention]
    torch.testing.assert_close(layer.weights().float(), calls[1].weights()[0, 1], rtol=1e-5, atol=1e-6)
    expected = (calls[1].weights()[0, 1] @ calls[1].value[0, 1]).double()
    torch.testing.assert_close(layer.output(layer.tokens), expected, rtol=1e-5, atol=1e-6)
    table = ladder(calls, trials=4)
    assert list(table.layer.unique()) == [0, 1]
    for _, rows in table[table.rung != "published"].groupby("layer"):
        assert rows.value.is_monotonic_increasing


def test_causal_calls_are_masked_and_position_bias_is_refused():
    q = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    call = probes.AttentionCall("a", 0, "self", query=q, key=q, value=q, causal=True)
    assert Layer.from_call(call).kind == "masked"
    rows = ladder(call)
    assert "published" not in set(rows.rung)
    assert rows.value.is_monotonic_increasing
    biased = probes.AttentionCall("a", 0, "self", query=q, key=q, value=q, bias=torch.arange(5.0))
    with pytest.raises(ValueError, match="a has a position bias"):
        Layer.from_call(biased)
    bare = probes.AttentionCall("a", 0, "self", scores=torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match="queries, keys and values"):
        Layer.from_call(bare)
    with pytest.raises(ValueError, match="other keys than queries"):
        Layer.from_call(probes.AttentionCall("a", 0, "cross", query=q, key=q[:, :, :3], value=q[:, :, :3]))


def test_bad_layers_are_refused():
    with pytest.raises(ValueError, match="keeps none"):
        Layer(torch.ones(2, 2), torch.eye(2), torch.eye(2), torch.tensor([[True, True], [False, False]]))
    with pytest.raises(ValueError, match=r"fit 3 tokens of 2 numbers.*\(2, 2\)"):
        Layer(torch.ones(3, 2), torch.eye(2), torch.eye(2), torch.ones(2, 2, dtype=torch.bool))


def test_a_constant_coordinate_does_not_move():
    layer = made(4, free=3)
    sums, directions = jacobian_sums(layer)
    assert (sums <= jacobian_sums(made(4))[0] + 1e-12).all()
    assert (directions[..., 3] == 0).all()


def test_figure(tmp_path):
    table = ladder([made(seed, "heavy-hitter") for seed in range(3)], trials=2)
    ax = plot_ladder(table)
    assert ax.get_yscale() == "log"
    assert len(ax.get_xticks()) == 3
    labels = {text.get_text() for text in ax.get_legend().get_texts()}
    assert labels >= set(table.rung)
    assert plot_ladder(table, ax=ax) is ax
    ax.figure.savefig(tmp_path / "ladder.png")
    assert isinstance(table, pd.DataFrame)


def test_a_token_that_moves_nothing_does_not_hide_the_others():
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        tokens, score = torch.randn(6, 4, generator=generator), torch.randn(4, 4, generator=generator)
        logits = tokens @ (score.T @ tokens.T)  # (query, key)
        kept = torch.nn.functional.one_hot(logits.argmax(-1), 6).bool()  # one key each: softmax does not move
        layer = Layer(tokens.double(), score.double(), torch.eye(4, dtype=torch.float64), kept, "heavy-hitter")
        rungs = ladder(layer).set_index("rung")["value"]
        most_kept = float(kept.sum(0).max())
        assert rungs["Jacobian blocks"] == pytest.approx(most_kept)
        assert rungs["finite difference"] == pytest.approx(most_kept, rel=1e-6)
