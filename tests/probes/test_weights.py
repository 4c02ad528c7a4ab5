"""Gamma, Upsilon and Xi against dense matrices, and against the logits and outputs that they bound."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import probes
from probes.weights import COLUMNS, norms, product_norm

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def test_norm_of_a_product_is_that_of_the_dense_matrix():
    left, right = (torch.randn(*s, generator=torch.Generator().manual_seed(3)) for s in ((30, 4), (4, 25)))
    dense = np.linalg.norm((left @ right).double().numpy(), 2)
    assert product_norm(left, right) == pytest.approx(dense, rel=1e-5)


def maps(kind, model):
    if kind == "BERT":
        layer = model.encoder.layer[1].attention
        return layer.self.query.weight, layer.self.key.weight, layer.self.value.weight, layer.output.dense.weight
    if kind == "GPT-2":
        layer = model.h[1].attn
        return (*layer.c_attn.weight.T.split(32), layer.c_proj.weight.T)
    layer = model.layers[1].self_attn
    key, value = (
        w.weight.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1) for w in (layer.k_proj, layer.v_proj)
    )
    return layer.q_proj.weight, key, value, layer.o_proj.weight


@pytest.mark.parametrize("kind", ["BERT", "GPT-2", "Llama"])
def test_library_models(kind):
    architecture = BY_NAME[kind]
    model = architecture.build("sdpa")
    table = norms(model, [architecture.batch("right")])
    assert tuple(table.columns) == COLUMNS
    query, key, value, out = (w.detach().double() for w in maps(kind, model))
    second = table[(table["layer"] == 1) & table["head"].notna()]
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        gamma = torch.linalg.matrix_norm(key[part].T @ query[part], 2) / 8**0.5
        upsilon = torch.linalg.matrix_norm(out[:, part] @ value[part], 2)
        rows = second[second["head"] == head].set_index("quantity")["value"]
        assert rows["score_norm"] == pytest.approx(float(gamma), rel=1e-6)
        assert rows["value_norm"] == pytest.approx(float(upsilon), rel=1e-6)
    notes = set(second[second["quantity"] == "score_norm"]["note"])
    assert notes == ({"before rotary embedding"} if kind == "Llama" else {""})
    assert (table[table["quantity"] == "mlp_norm"]["value"] > 0).all()


def test_the_largest_token_is_a_real_one():
    architecture = BY_NAME["BERT"]
    model, batch = architecture.build("eager"), architecture.batch("right")
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    table = norms(model, [batch])
    found = table[table["quantity"] == "token_norm"].sort_values("layer")["value"]
    real = batch["attention_mask"].bool()
    expected = [float(states[layer][real].norm(dim=-1).max()) for layer in range(2)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_torch_attention_and_what_is_not_available():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    table = norms(model, [(x, x, x)])
    query, key, _ = model.in_proj_weight.detach().double().chunk(3)
    gamma = table[(table["quantity"] == "score_norm") & (table["head"] == 1)]["value"].item()
    assert gamma == pytest.approx(float(torch.linalg.matrix_norm(key[8:].T @ query[8:], 2) / 8**0.5), rel=1e-6)
    with probes.capture(model) as calls:
        model(x, x, x)
    # Without biases no logit exceeds Gamma Xi^2.
    xi = table[table["quantity"] == "token_norm"]["value"].item()
    assert xi == pytest.approx(float(x.norm(dim=-1).max()), rel=1e-6)
    assert float(calls[0].logits()[:, 1].abs().max()) <= gamma * xi**2 * (1 + 1e-6)
    qwen = BY_NAME["Qwen3"]
    table = norms(qwen.build("sdpa"), [qwen.batch("none")])
    rows = table[table["quantity"] == "score_norm"]
    assert rows["value"].isna().all()
    assert rows["note"].str.startswith("not available").all()
