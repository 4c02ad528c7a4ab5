"""Statistics of an attention call against a plain double loop, in one pass and in blocks."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import probes
from probes import leading
from probes import scan as scanning
from probes.attention import AttentionCall
from probes.scan import scan
from probes.statistics import PER_QUERY, dispersion, separation, sink_ratio, tail_mass_bound

sys.path.insert(0, str(Path(__file__).parent))
import brute

# Few different numbers make ties; -0.0 equals 0.0; real logits may lie below every mask value in use.
TIED = st.sampled_from([-3e5, -2.5, -1.0, -0.0, 0.0, 0.25, 1.0, 3.0, 40.0])
SELECTIONS = [
    probes.Full(),
    probes.TopK(2),
    probes.TopK(5),
    probes.TopK(50),
    probes.TopK(2, "threshold"),
    probes.Hardmax(),
]


def make_call(scores, mask, sinks=None):
    return AttentionCall("m", 0, "self", scores=scores, mask=mask, sinks=sinks)


@st.composite
def cases(draw):
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 4), st.integers(1, 7)))
    elements = draw(st.sampled_from([TIED, st.floats(-30, 30, width=32)]))
    scores = draw(hnp.arrays(np.float32, shape, elements=elements))
    mask = draw(hnp.arrays(bool, shape, elements=st.sampled_from([True, True, False])))
    real = draw(hnp.arrays(bool, (shape[0], shape[2]), elements=st.sampled_from([True, True, False])))
    sinks = draw(st.none() | hnp.arrays(np.float32, shape[1], elements=st.floats(-3, 3, width=32)))
    return scores, mask, real, sinks


@settings(deadline=None, max_examples=50)
@given(cases(), st.sampled_from([1, 7, 2**19]))
def test_every_statistic_equals_the_double_loop(case, block):
    scores, mask, real, sinks = case
    call = make_call(torch.tensor(scores), torch.tensor(mask), None if sinks is None else torch.tensor(sinks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "BLOCK", block)
        result = scan(call, SELECTIONS, torch.tensor(real))
    batch, heads, queries, keys = scores.shape
    for selection, outcome in zip(SELECTIONS, result.outcomes, strict=True):
        kept = selection.keep(call.logits(), call.allowed()).numpy()
        for b in range(batch):
            for h in range(heads):
                for q in range(queries):
                    row, allowed = [float(z) for z in scores[b, h, q]], mask[b, h, q]
                    if isinstance(selection, probes.TopK) and selection.ties == "exact":
                        assert kept[b, h, q].tolist() == brute.largest(row, allowed, selection.k)
                    expected = brute.of_query(row, kept[b, h, q], allowed, None if sinks is None else float(sinks[h]))
                    for name in PER_QUERY:
                        got = outcome.queried[name][b, h, q].item()
                        if expected is None:
                            assert math.isnan(got)
                        elif name in ("dispersion", "separation", "kept", "max_logit", "max_abs_logit"):
                            assert got == expected[name] or (math.isnan(got) and math.isnan(expected[name]))
                        else:
                            assert got == pytest.approx(expected[name], abs=2e-6, rel=2e-6), name
                counted = real[b]
                seen = [any(mask[b, h, q, j] and counted[q] for q in range(queries)) for j in range(keys)]
                assert result.seen[b, h].tolist() == seen
                counts = [sum(int(kept[b, h, q, j]) for q in range(queries) if counted[q]) for j in range(keys)]
                assert outcome.counts[b, h].tolist() == counts


@settings(deadline=None, max_examples=30)
@given(hnp.arrays(np.float32, (1, 1, 3, 5), elements=st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])))
def test_infinite_and_missing_logits_are_undefined_or_exact_and_never_swallowed(scores):
    call = make_call(torch.tensor(scores), torch.ones(1, 1, 3, 5, dtype=torch.bool))
    result = scan(call, [probes.Full(), probes.TopK(2)], torch.ones(1, 3, dtype=torch.bool))
    assert result.invalid == int(np.isnan(scores).any(-1).sum())
    for q in range(3):
        spread = result.outcomes[0].queried["dispersion"][0, 0, q].item()
        with np.errstate(invalid="ignore"):
            expected = float(scores[0, 0, q].astype(float).max() - scores[0, 0, q].astype(float).min())
        assert spread == expected or (math.isnan(spread) and math.isnan(expected))


def test_attention_received_and_sink_ratio_of_counted_queries_only():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 6, 6, generator=generator)
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 4:] = False
    mask = real[:, None, None, :]
    call = make_call(scores, mask)
    kept = probes.TopK(3).keep(scores, mask.expand_as(scores))
    weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    outcome = scan(call, [probes.TopK(3)], real).outcomes[0]
    torch.testing.assert_close(outcome.mass[1], weights[1, :, :4].sum(-2).double())
    assert torch.equal(outcome.counts[1], kept[1, :, :4].sum(-2).double())
    expected = [brute.sink_ratios(kept[1, h].tolist(), real[1].tolist()) for h in range(3)]
    np.testing.assert_allclose(sink_ratio(kept[1, :, :4]), expected)


@pytest.mark.parametrize("keys", [40, 2048, 5000])
@pytest.mark.parametrize("causal", [False, True])
def test_long_rows_in_blocks_equal_one_look_at_the_whole(keys, causal):
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(1, 4, 37 if not causal else keys, 8, generator=generator)[:, :, :600]
    key = torch.randn(1, 2, keys, 8, generator=generator)
    call = AttentionCall("m", 0, "self", query=query, key=key, scale=0.9, causal=causal)
    logits, allowed = call.logits(), call.allowed()
    result = scan(call, [probes.Full(), probes.TopK(5)], torch.ones(1, query.shape[2], dtype=torch.bool))
    kept = probes.TopK(5).keep(logits, allowed)
    full, top = result.outcomes
    torch.testing.assert_close(full.queried["dispersion"], dispersion(logits, allowed), atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(top.queried["dispersion"], dispersion(logits, kept), atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(
        top.queried["separation"], separation(logits, kept, allowed), atol=5e-6, rtol=1e-6, equal_nan=True
    )
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    torch.testing.assert_close(full.mass, weights.double().sum(-2), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        full.queried["entropy"], -(weights * weights.clamp_min(1e-45).log()).sum(-1), atol=1e-4, rtol=1e-5
    )
    tail = weights.masked_fill(kept, 0.0).sum(-1)
    torch.testing.assert_close(top.queried["tail_mass"], tail, atol=1e-6, rtol=1e-4)
    # float32 products may differ in the last bit between blocks, which can swap near-ties.
    assert (top.counts - kept.sum(-2)).abs().sum() <= 4


def test_the_certificate_bounds_the_tail():
    scores = torch.randn(1, 4, 50, 64, generator=torch.Generator().manual_seed(1)) * 3
    call = make_call(scores, torch.ones(1, 1, 1, 64, dtype=torch.bool))
    values = scan(call, [probes.TopK(7)], torch.ones(1, 50, dtype=torch.bool)).outcomes[0].queried
    assert (values["tail_mass"] <= values["tail_mass_bound"] + 1e-6).all()
    assert tail_mass_bound(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(2.0)) == 0.5


def test_an_empty_batch_and_wrong_shapes():
    call = make_call(torch.empty(0, 2, 3, 3), torch.ones(0, 1, 1, 3, dtype=torch.bool))
    outcome = scan(call, [probes.Full(), probes.TopK(2)], torch.ones(0, 3, dtype=torch.bool)).outcomes[1]
    assert outcome.queried["dispersion"].shape == (0, 2, 3)
    with pytest.raises(ValueError, match="shape"):
        dispersion(torch.zeros(2, 3), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="shape"):
        separation(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize("causal", [False, True])
def test_numba_and_torch_give_equal_numbers(causal):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(2, 2, 130, 8, generator=generator) for _ in range(2))
    key[:, :, 70] = key[:, :, 3]  # ties
    mask = torch.ones(2, 1, 1, 130, dtype=torch.bool)
    mask[0, ..., 100:] = False
    call = AttentionCall("m", 0, "self", query=query, key=key, scale=1.5, causal=causal, mask=mask)
    results = []
    for accelerated in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leading, "ACCELERATED", accelerated)
            results.append(scan(call, [probes.Full(), probes.TopK(5)], torch.ones(2, 130, dtype=torch.bool)))
    for quick, slow in zip(results[0].outcomes, results[1].outcomes, strict=True):
        for name in PER_QUERY:
            assert torch.equal(quick.queried[name].nan_to_num(-1.0), slow.queried[name].nan_to_num(-1.0)), name
        assert torch.equal(quick.counts, slow.counts)
        torch.testing.assert_close(quick.mass, slow.mass, rtol=1e-12, atol=1e-12)
