"""One architecture against its own attention weights, and what the comparison gave."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import probes
from probes.scan import scan

sys.path.insert(0, str(Path(__file__).parent))
import brute
from architectures import Architecture


@dataclass(frozen=True)
class Checked:
    """What was found for one implementation and padding.

    Args:
        calls: number of attention calls.
        kinds: self, cross or both.
        how: how the calls were captured.
        weights: largest difference between softmax of the captured logits and the model's own weights.
        keys: whether the allowed keys are exactly those with a positive weight.
        statistics: largest difference of dispersion and separation from a double loop over the model's own weights.
        unchanged: whether the model's outputs were bit-identical with and without the probe.
        real: number of real queries in each call, None where no padding was given.
    """

    calls: int
    kinds: tuple[str, ...]
    how: tuple[str, ...]
    weights: float
    keys: bool
    statistics: float
    unchanged: bool
    real: tuple[int | None, ...]


class OwnWeights:
    """Notes the attention weights that a model's modules return, by module, in the order of the calls."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Tensor] = []
        self._handles = [module.register_forward_hook(self._note) for module in model.modules()]

    def _note(self, module: nn.Module, args: object, output: object) -> None:
        if not isinstance(output, tuple):
            return
        for value in output[1:]:
            weights = isinstance(value, Tensor) and value.ndim == 4 and _sums_to_one(value)
            # Wrapping modules hand the same tensor on.
            if weights and not any(value is known for known in self.seen):
                self.seen.append(value)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _sums_to_one(value: Tensor) -> bool:
    total = value.float().sum(-1)
    return bool(((value >= 0).all()) and (total <= 1 + 1e-3).all() and total.max() > 0)


def own_weights(architecture: Architecture, batch: dict[str, Tensor]) -> list[Tensor]:
    """The weights that the library's eager code computes, call by call."""
    model = architecture.build("eager")
    noted = OwnWeights(model)
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    noted.close()
    if architecture.kind == "windows":
        return noted.seen
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    found = {name: list(output[name]) for name in names if output.get(name) is not None}
    if architecture.kind == "pair":
        found["attentions"] = [*output.text_model_output.attentions, *output.vision_model_output.attentions]
    if "cross_attentions" in found and "decoder_attentions" in found:
        pairs = zip(found.pop("decoder_attentions"), found.pop("cross_attentions"), strict=True)
        found["decoder_attentions"] = [weights for pair in pairs for weights in pair]
    return [
        weights
        for name in ("encoder_attentions", "decoder_attentions", "attentions")
        for weights in found.get(name, [])
    ]


def sdpa_outputs(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """What torch's attention returns, call by call, where there are no weights to compare with."""
    outputs = []
    original = nn.functional.scaled_dot_product_attention

    def noting(*args: object, **kwargs: object) -> Tensor:
        outputs.append(original(*args, **kwargs))
        return outputs[-1]

    nn.functional.scaled_dot_product_attention = noting
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        nn.functional.scaled_dot_product_attention = original
    return outputs


def check(architecture: Architecture, implementation: str, padding: str) -> Checked:
    """Capture one run and compare."""
    model, batch = architecture.build(implementation), architecture.batch(padding)
    with torch.no_grad():
        before = model(**batch)
        with probes.capture(model) as calls:
            after = model(**batch)
    unchanged = all(torch.equal(x, y) for x, y in zip(_tensors(before), _tensors(after), strict=True))
    if architecture.differs and implementation == "sdpa":
        outputs = sdpa_outputs(model, batch)
        pairs = [(call.weights() @ call.value, output, call) for call, output in zip(calls, outputs, strict=True)]
        exact = [call.weights() for call in calls]
    else:
        exact = own_weights(architecture, batch)
        if architecture.kind == "pair":  # the order in which text and image run is the model's own affair
            exact = [min((w for w in exact if w.shape == c.weights().shape), key=lambda w: _gap(w, c)) for c in calls]
        pairs = [(call.weights(), weights, call) for call, weights in zip(calls, exact, strict=True)]
    # A padded query without keys gets other weights from eager code than from sdpa, and so do the layers after it.
    error = max(float((mine - own)[_comparable(call)].abs().max()) for mine, own, call in pairs)
    keys = all(
        bool(((own > 1e-38) == call.allowed())[call.allowed().any(-1)].all())
        for call, own in zip(calls, exact, strict=True)
    )
    statistics = max(_against_loop(call, own) for call, own in zip(calls, exact, strict=True))
    real = tuple(None if call.queries is None else int(call.queries.sum()) for call in calls)
    kinds, how = (tuple(dict.fromkeys(getattr(c, name) for c in calls)) for name in ("kind", "implementation"))
    return Checked(len(calls), kinds, how, error, keys, statistics, unchanged, real)


def _comparable(call: probes.AttentionCall) -> Tensor:
    rows = call.allowed().any(-1)
    return rows if call.queries is None or "eager" in call.implementation else rows & call.queries[:, None]


def _gap(weights: Tensor, call: probes.AttentionCall) -> float:
    return float((weights - call.weights())[call.allowed().any(-1)].abs().max())


def _tensors(output: object) -> list[Tensor]:
    values = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [value for value in values if isinstance(value, Tensor)]


def _against_loop(call: probes.AttentionCall, weights: Tensor) -> float:
    """Dispersion, separation and sink ratio against a loop over the logarithms of the model's own weights."""
    selections = [probes.Full(), probes.TopK(3)]
    real = call.queries if call.queries is not None else torch.ones(call.shape[0], call.shape[2], dtype=torch.bool)
    full, top = scan(call, selections, real).outcomes
    allowed, worst = call.allowed(), 0.0
    # One element and head of each call, and only rows in which float32 weights still carry the logits.
    for query in range(0, call.shape[2], 2):
        row = weights[-1, -1, query].double()
        if not real[-1, query] or not allowed[-1, -1, query].any() or row[row > 0].min() < 1e-6:
            continue
        logits = [float(x) for x in row.clamp_min(1e-300).log()]
        some = allowed[-1, -1, query].tolist()
        kept = brute.largest(logits, some, 3)
        for outcome, keys in ((full, some), (top, kept)):
            expected = brute.spread_and_gap(logits, keys, some)
            for name in ("dispersion", "separation"):
                got = outcome.queried[name][-1, -1, query].item()
                if expected[name] == expected[name] or got == got:
                    worst = max(worst, abs(got - expected[name]))
    return worst
