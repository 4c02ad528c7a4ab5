"""What must hold for every selection, on random calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.attention import AttentionCall
from probes.selection import THEOREM, Selection, Union, known, parse
from probes.statistics import dispersion, separation, tail_mass_bound

NAMES = (
    "full", "observed", "topk:3", "topk:3:threshold", "top-p:0.8", "threshold:1", "hardmax", "entmax:1.5", "sparsemax",
    "bottom-k:3", "random-k:3", "random-k:3:1:replacement", "banded:3", "block:3", "strided:2:6", "global:1", "sink:2",
    "window:2", "streaming:1:2", "a-shape:1:2", "moba:3:2", "quest:3:2", "nsa-like:3:1", "lsh:4:2", "zeta:3",
    "cluster:3", "sinkhorn-like:3", "vertical-slash:2:2", "banded:3+global:1", "topk:2&banded:3",
    "nsa-like:2:1+window:2", "topk:2+sink:1", "topk:3+top-p:0.5",
)  # fmt: skip
HEAVY = tuple(name for name in NAMES if parse(name).kind == "heavy-hitter")


@st.composite
def calls(draw, ties=True):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    batch, heads = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
    length, dim = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    query = torch.randn(batch, heads, length, dim, generator=generator)
    key = torch.randn(batch, max(1, heads // 2), length, dim, generator=generator)
    if ties and draw(st.booleans()):
        query, key = query.round(), key.round()
    mask = torch.rand(batch, 1, length, length, generator=generator) < draw(st.sampled_from([0.4, 1.0]))
    queries = None
    if draw(st.booleans()):
        queries = torch.arange(length) < torch.randint(1, length + 1, (batch, 1), generator=generator)
        mask = mask & queries[:, None, None]
    return AttentionCall(
        "attention", 0, "self", query=query, key=key, scale=draw(st.sampled_from([0.3, 1.0, 8.0])), mask=mask,
        causal=draw(st.booleans()), queries=queries,
    )  # fmt: skip


def keep(name, call):
    return parse(name).keep(call.logits(), call.allowed(), call=call)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(call=calls())
def test_kept_keys_are_allowed_and_at_least_one(name, call):
    kept, allowed = keep(name, call), call.allowed()
    assert kept.shape == allowed.shape
    assert kept.dtype == torch.bool
    assert not (kept & ~allowed).any()
    assert kept.any(-1).equal(allowed.any(-1))
    assert kept.equal(keep(name, call))


@pytest.mark.parametrize("name", ["topk:3", "hardmax", "bottom-k:3", "random-k:3", "banded:3", "zeta:3"])
@settings(max_examples=25, deadline=None)
@given(call=calls())
def test_exactly_k_where_k_are_allowed(name, call):
    k = 1 if name == "hardmax" else 3
    assert keep(name, call).sum(-1).equal(call.allowed().sum(-1).clamp(max=k))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(call=calls())
def test_order_of_heads_and_batch_elements_does_not_matter(name, call):
    key = call.key.repeat_interleave(call.shape[1] // call.key.shape[1], 1)
    turned = dataclasses.replace(
        call, query=call.query.flip(0, 1), key=key.flip(0, 1), mask=call.mask.flip(0),
        queries=None if call.queries is None else call.queries.flip(0),
    )  # fmt: skip
    # Another memory layout may move the last bit of a product; both ask about the same logits.
    logits = call.logits()
    one = parse(name).keep(logits, call.allowed(), call=dataclasses.replace(call, key=key))
    two = parse(name).keep(logits.flip(0, 1), call.allowed().flip(0), call=turned)
    if "vertical" not in name:
        assert two.flip(0, 1).equal(one)


@pytest.mark.parametrize("name", NAMES)
def test_values_at_disallowed_keys_have_no_say(name):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 2, 8, 8, generator=generator)
    allowed = (torch.rand(2, 2, 8, 8, generator=generator) < 0.6) & torch.ones(8, 8, dtype=torch.bool).tril()
    call = AttentionCall(
        "attention", 0, "self", query=torch.randn(2, 2, 8, 3, generator=generator), mask=allowed,
        key=torch.randn(2, 2, 8, 3, generator=generator), scale=1.0,
    )  # fmt: skip
    selection = parse(name)
    plain = selection.keep(logits, allowed, call=call)
    for value in (-1e9, 1e9, torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).min):
        changed = logits.masked_fill(~allowed, value)
        assert selection.keep(changed, allowed, call=call).equal(plain)


@pytest.mark.parametrize("name", HEAVY)
@settings(max_examples=25, deadline=None)
@given(call=calls())
def test_heavy_hitters_keep_the_largest(name, call):
    logits, allowed, kept = call.logits(), call.allowed(), keep(name, call)
    gap = separation(logits, kept, allowed)
    assert (gap[~gap.isnan()] >= 0).all()
    spread, whole = dispersion(logits, kept), dispersion(logits, allowed)
    some = allowed.any(-1)
    assert (spread[some] <= whole[some]).all()


@pytest.mark.parametrize(
    ("small", "large"),
    [("topk:1", "topk:2"), ("topk:2", "topk:5"), ("hardmax", "topk:1:threshold"), ("top-p:0.3", "top-p:0.6"),
     ("top-p:0.6", "top-p:0.99"), ("top-p:0.99", "top-p:1"), ("threshold:0.5", "threshold:2"),
     ("sparsemax", "entmax:1.5"), ("entmax:1.5", "entmax:1.2"), ("bottom-k:2", "bottom-k:4"), ("banded:3", "banded:5"),
     ("random-k:2", "random-k:4"), ("streaming:1:2", "streaming:2:3"), ("quest:2:1", "quest:2:2"),
     ("moba:2:1", "moba:2:2"), ("nsa-like:2:1", "nsa-like:2:2"), ("zeta:2", "zeta:4"), ("lsh:4:1", "lsh:4:1+sink:1")],
)  # fmt: skip
@settings(max_examples=15, deadline=None)
@given(call=calls())
def test_more_is_a_superset(small, large, call):
    if small.startswith("entmax") or small == "sparsemax":
        # The support grows towards softmax up to rounding at its very edge.
        assert (keep(small, call).sum(-1) <= keep(large, call).sum(-1)).all()
        return
    assert not (keep(small, call) & ~keep(large, call)).any()


@pytest.mark.parametrize("name", ["topk:2+sink:1", "lsh:4:1+window:2+topk:1", "topk:3&banded:4", "lsh:4:2&zeta:3"])
@settings(max_examples=25, deadline=None)
@given(call=calls())
def test_compositions_are_unions_and_intersections_of_what_the_parts_keep(name, call):
    parts = [keep(part, call) for part in name.replace("&", "+").split("+")]
    stacked, kept = torch.stack(parts), keep(name, call)
    if "&" not in name:
        assert kept.equal(stacked.any(0))
    else:
        both = stacked.all(0)
        some = both.any(-1)
        assert kept[some].equal(both[some])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(call=calls())
def test_tail_mass_is_at_most_its_certificate(name, call):
    logits, allowed, kept = call.logits().double(), call.allowed(), keep(name, call)
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    some = allowed.any(-1)
    tail = weights.masked_fill(kept, 0.0).sum(-1)[some]
    bound = tail_mass_bound(separation(logits, kept, allowed), kept.sum(-1).double(), allowed.sum(-1).double())[some]
    assert (tail <= bound + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (1, 1, 1, 1)])
def test_empty_and_single(name, shape):
    batch, heads, queries, keys = shape
    call = AttentionCall(
        "a", 0, "self", query=torch.ones(batch, heads, queries, 2), key=torch.ones(batch, heads, keys, 2)
    )
    allowed = torch.ones(shape, dtype=torch.bool)
    assert parse(name).keep(torch.zeros(shape), allowed, call=call).equal(allowed)


def test_every_registered_word_is_covered_and_described():
    words = {part.split(":")[0] for name in NAMES for term in name.split("+") for part in term.split("&")}
    assert words | {"gate"} == set(known())
    for word, cls in known().items():
        usage, _, line = cls.summary.partition(": ")
        assert usage.split(":")[0] == word
        assert line
        assert cls.kind in THEOREM


def test_names_are_read_back():
    for name in (*NAMES, "topk:5:threshold", "random-k:4:2", "lsh:16:4", "zeta:16", "gate:4:2", "top-p:0.999999999"):
        selection = parse(name)
        assert selection.name == str(selection) == name
        assert parse(selection.name) == selection
        assert parse(selection) is selection
        assert isinstance(selection, Selection)
    assert parse(" topk:5 ").name == "topk:5"
    assert parse("topk:5 + window:4") == parse("topk:5+window:4")


def test_kinds_of_compositions():
    kinds = {
        "banded:3+global:1": "regular", "banded:3&block:4": "regular", "topk:2+top-p:0.5": "heavy-hitter",
        "topk:2&entmax:1.5": "heavy-hitter", "topk:2+sink:1": "input-dependent", "full+topk:2": "full",
        "full&topk:2": "heavy-hitter", "random-k:2+random-k:3:1": "input-dependent",
        "moba:2:2+window:2": "input-dependent", "observed&topk:2": "input-dependent",
    }  # fmt: skip
    assert {name: parse(name).kind for name in kinds} == kinds
    assert parse("topk:2+sink:1").theorem == "no theorem"


@pytest.mark.parametrize(
    ("text", "near"),
    [("topkk:5", "topk"), ("top-k:5", "topk"), ("mobba:4:4", "moba"), ("streaming-llm:4:4", "streaming"),
     ("entmx:1.5", "entmax"), ("topk:5+windw:3", "window"), ("Sparsemax", "sparsemax"),
     ("vertical-slsh:1:1", "vertical-slash")],
)  # fmt: skip
def test_a_wrong_name_lists_the_near_ones(text, near):
    with pytest.raises(ValueError, match=rf"Did you mean .*{near}") as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in known())


@pytest.mark.parametrize("text", ["", "+", "topk:5+", "&topk:5", "topk", "topk:5:exact:9", "full:1", "banded:3:3"])
def test_broken_names(text):
    with pytest.raises(ValueError, match="Expected a selection"):
        parse(text)
    with pytest.raises(ValueError, match="at least two"):
        Union((parse("full"),))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape of `logits`"):
        parse("topk:2").keep(torch.zeros(1, 1, 2, 3), torch.ones(1, 1, 3, 3, dtype=torch.bool))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k_against_x_transformers(k):
    attend = pytest.importorskip("x_transformers.attend").Attend(causal=True, sparse_topk=k)
    generator = torch.Generator().manual_seed(k)
    q, key, v = (torch.randn(2, 3, 9, 4, generator=generator) for _ in range(3))
    _, intermediates = attend(q, key, v)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 3, 9, 9)
    kept = parse(f"topk:{k}").keep(q @ key.mT * 4**-0.5, allowed)
    assert kept.equal(intermediates.post_softmax_attn > 0)
