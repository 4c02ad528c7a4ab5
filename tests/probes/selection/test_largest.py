"""Selections by the logits, each against a plain loop over one row in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.selection import parse

entmax = pytest.importorskip("entmax")


def ranked(logits, allowed):
    """Allowed keys from the largest logit down, NaN as minus infinity, the lowest index first among equals."""
    keys = [j for j in range(len(logits)) if allowed[j]]
    return sorted(keys, key=lambda j: (-value(logits[j]), j))


def value(logit):
    return -math.inf if math.isnan(logit) else logit


def top_k(logits, allowed, k):
    return set(ranked(logits, allowed)[:k])


def top_k_with_ties(logits, allowed, k):
    order = ranked(logits, allowed)
    return {j for j in order if value(logits[j]) >= value(logits[order[:k][-1]])} if order else set()


def bottom_k(logits, allowed, k):
    keys = [j for j in range(len(logits)) if allowed[j]]
    return set(sorted(keys, key=lambda j: (math.inf if math.isnan(logits[j]) else logits[j], j))[:k])


def weights(logits, allowed):
    """Unnormalised softmax weights; an infinite maximum stands for its limit."""
    keys = [j for j in range(len(logits)) if allowed[j]]
    top = max((value(logits[j]) for j in keys), default=0.0)
    if math.isinf(top):
        return {j: float(value(logits[j]) == top) for j in keys}
    return {j: math.exp(value(logits[j]) - top) for j in keys}


def top_p(logits, allowed, p):
    mass, kept, weight = 0.0, set(), weights(logits, allowed)
    for j in ranked(logits, allowed):
        if mass / sum(weight.values()) >= p:
            break
        kept.add(j)
        mass += weight[j]
    return kept if p < 1 else set(weight)


def threshold(logits, allowed, tau):
    keys = [j for j in range(len(logits)) if allowed[j]]
    top = max((value(logits[j]) for j in keys), default=0.0)
    return {j for j in keys if value(logits[j]) >= top - tau}


RULES = {
    "topk:1": lambda s, c: top_k(s, c, 1),
    "topk:3": lambda s, c: top_k(s, c, 3),
    "topk:50": lambda s, c: top_k(s, c, 50),
    "topk:2:threshold": lambda s, c: top_k_with_ties(s, c, 2),
    "topk:50:threshold": lambda s, c: top_k(s, c, 50),
    "hardmax": lambda s, c: top_k(s, c, 1),
    "bottom-k:2": lambda s, c: bottom_k(s, c, 2),
    "top-p:0.3": lambda s, c: top_p(s, c, 0.3),
    "top-p:0.9": lambda s, c: top_p(s, c, 0.9),
    "top-p:1": lambda s, c: top_p(s, c, 1.0),
    "threshold:0": lambda s, c: threshold(s, c, 0.0),
    "threshold:1.5": lambda s, c: threshold(s, c, 1.5),
}

# Quarters are exact in float32, so that the loop in Python floats and the rule agree on every comparison.
LOGIT = st.one_of(
    st.integers(-8, 8).map(lambda n: n / 4),
    st.sampled_from([-0.0, math.inf, -math.inf, math.nan, -3.4e38, -1e9, 1e5]),
)


@st.composite
def problems(draw, logit=LOGIT):
    queries, keys = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    logits = [[draw(logit) for _ in range(keys)] for _ in range(queries)]
    allowed = [[draw(st.booleans()) for _ in range(keys)] for _ in range(queries)]
    return logits, allowed


def kept_sets(name, logits, allowed, dtype=torch.float32):
    kept = parse(name).keep(torch.tensor([[logits]], dtype=dtype), torch.tensor([[allowed]]))
    return [set(row.nonzero().flatten().tolist()) for row in kept[0, 0]]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_rule_equals_a_plain_loop(name, problem):
    logits, allowed = problem
    assert kept_sets(name, logits, allowed) == [RULES[name](s, c) for s, c in zip(logits, allowed, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_other_dtypes(name, dtype):
    logits = [[0.25, 1.5, -2.0, 1.5, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0]]
    allowed = [[True] * 5, [False, True, True, True, True]]
    expected = [RULES[name](s, c) for s, c in zip(logits, allowed, strict=True)]
    assert kept_sets(name, logits, allowed, dtype) == expected


@pytest.mark.parametrize("name", ["top-p:0.9", "top-p:0.999", "entmax:1.5", "entmax:1.05", "sparsemax"])
def test_long_rows_that_need_more_than_the_first_candidates(name):
    logits = torch.randn(1, 2, 5, 700, generator=torch.Generator().manual_seed(0)).double() * 0.3
    allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.9
    kept = parse(name).keep(logits, allowed)
    masked = logits.masked_fill(~allowed, -torch.inf)
    if name.startswith("top-p"):
        for row, s, c in zip(kept.flatten(0, 2), logits.flatten(0, 2), allowed.flatten(0, 2), strict=True):
            assert set(row.nonzero().flatten().tolist()) == top_p(s.tolist(), c.tolist(), float(name.split(":")[1]))
    else:
        alpha = 2.0 if name == "sparsemax" else float(name.split(":")[1])
        assert kept.equal(entmax.entmax_bisect(masked, alpha, n_iter=100) > 0)


@settings(max_examples=60, deadline=None)
@given(
    problem=problems(st.integers(-7, 7).map(lambda n: n / 8 + 0.01 * (n % 3))),
    alpha=st.sampled_from([1.3, 1.5, 2.0, 3.5]),
)
def test_entmax_support_is_that_of_the_library(problem, alpha):
    logits, allowed = (torch.tensor([[part]]) for part in problem)
    logits = logits.double()
    for name in [f"entmax:{alpha}", *(["sparsemax"] if alpha == 2 else [])]:
        kept = parse(name).keep(logits, allowed)
        for row, s, c in zip(kept[0, 0], logits[0, 0], allowed[0, 0], strict=True):
            if bool(c.any()):
                exact = {1.5: entmax.entmax15, 2.0: entmax.sparsemax}
                solve = exact.get(alpha, lambda z: entmax.entmax_bisect(z, alpha, n_iter=200))
                assert row[c].equal(solve(s[c]) > 1e-12)
            assert not row[~c].any()


def test_entmax_with_infinite_and_nan_logits():
    inf, nan = math.inf, math.nan
    logits = [[inf, 0.0, inf, nan], [-inf, -inf, -inf, -inf], [nan, nan, nan, nan], [0.0, -inf, nan, 0.1]]
    allowed = [[True] * 4, [True, True, True, False], [False, True, True, False], [True] * 4]
    assert kept_sets("entmax:1.5", logits, allowed) == [{0, 2}, {0, 1, 2}, {1, 2}, {0, 3}]


def test_equal_logits_reach_a_round_mass_with_no_key_too_many():
    for keys in range(1, 40):
        for count in range(1, keys):
            assert kept_sets(f"top-p:{count / keys!r}", [[0.7] * keys], [[True] * keys]) == [set(range(count))]


def test_random_k_keeps_exactly_k_and_repeats_itself():
    logits, allowed = (
        torch.zeros(2, 3, 50, 20),
        torch.rand(2, 3, 50, 20, generator=torch.Generator().manual_seed(0)) < 0.6,
    )
    kept = parse("random-k:5:3").keep(logits, allowed)
    assert kept.sum(-1).equal(allowed.sum(-1).clamp(max=5))
    assert kept.equal(parse("random-k:5:3").keep(logits, allowed))
    assert not kept.equal(parse("random-k:5:4").keep(logits, allowed))
    assert kept[:, :, 7:19].equal(parse("random-k:5:3").keep(logits[:, :, 7:19], allowed[:, :, 7:19], start=7))


@pytest.mark.parametrize(("name", "share"), [("random-k:5", 5 / 40), ("random-k:5::replacement", 1 - (39 / 40) ** 5)])
def test_random_k_is_uniform(name, share):
    name = name.replace("::", ":0:")
    shape = (1, 1, 8000, 40)
    kept = parse(name).keep(torch.zeros(shape), torch.ones(shape, dtype=torch.bool)).float()
    frequency = kept.mean((0, 1, 2))
    assert (frequency - share).abs().max() < 5 * math.sqrt(share * (1 - share) / shape[2])
    pairs = kept[0, 0].T @ kept[0, 0] / shape[2]
    expected = 5 * 4 / (40 * 39) if name == "random-k:5" else 1 - 2 * (39 / 40) ** 5 + (38 / 40) ** 5
    off = pairs[~torch.eye(40, dtype=torch.bool)]
    assert (off - expected).abs().max() < 6 * math.sqrt(expected / shape[2])


def test_random_k_with_replacement_draws_among_the_allowed():
    allowed = torch.tensor([True, False, True, True, False, False, True, False]).expand(1, 1, 4000, 8)
    kept = parse("random-k:3:9:replacement").keep(torch.zeros(1, 1, 4000, 8), allowed)
    assert not (kept & ~allowed).any()
    counts = kept.sum(-1).flatten().bincount(minlength=4)[1:] / 4000
    expected = torch.tensor([4 / 64, 36 / 64, 24 / 64])  # 1, 2, 3 distinct keys from 3 draws among 4
    assert (counts - expected).abs().max() < 0.04


@pytest.mark.parametrize(
    "name",
    [
        "topk:0",
        "topk:-1",
        "topk:1.5",
        "topk:2:sideways",
        "top-p:0",
        "top-p:1.1",
        "top-p:nan",
        "threshold:-1",
        "threshold:nan",
        "entmax:1",
        "entmax:inf",
        "entmax:x",
        "bottom-k:0",
        "random-k:0",
        "random-k:1:-1",
        "random-k:1:1:no",
    ],
)
def test_wrong_parameters_are_refused_in_one_sentence(name):
    with pytest.raises(ValueError, match="Expected a selection of the form") as caught:
        parse(name)
    assert "\n" not in str(caught.value)
