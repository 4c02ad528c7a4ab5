r"""What if a trained model attended by another rule? Every selection on the model's own logits, keys and values.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Theorems 3 to 5 and Appendix F.4.
[2] Tzachristas et al., arXiv 2512.07647: a bound on the mass left out that needs only the separation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from probes.attention import AttentionCall
from probes.capture import Capture
from probes.measure import measure
from probes.selection import THEOREM, Full, Kind, Selection, parse

BLOCK = 2**20
"""Logits looked at together."""

PERCENTILES = (50, 75, 90, 95, 99, 100)
RESOLUTION = 2.0**-23
"""Spacing of float32 numbers: a separation of at most this times the largest logit is rounding noise."""

COLUMNS = (
    "model", "module", "layer", "head", "scope", "selection", "kind", "theorem", "keys", "kept_share", "percentile",
    "dispersion_full", "dispersion", "separation", "sink_ratio", "tail_mass", "tail_mass_bound", "output_error",
    "parameter_condition", "input_condition", "verdict_parameter", "verdict_input", "verdict",
)  # fmt: skip

_PLACE = ["scope", "module", "layer", "head"]


def what_if(
    model: nn.Module,
    batches: Iterable[Any],
    selections: Sequence[Selection | str],
    *,
    percentile: int = 75,
    name: str | None = None,
    include_padding: bool = False,
    progress: bool | None = None,
) -> pd.DataFrame:
    r"""Apply selections to a model's logits, each query by itself, and say what changes.

    Nothing is run with fewer keys here: all layers see the model's own inputs. `probes.apply` runs the model with a
    selection in place, and `probes.effect` reports what that does to its outputs.

    Columns: `keys` (mean number kept) and `kept_share` (kept keys over allowed keys, pooled); `dispersion_full`,
    `dispersion` and `sink_ratio` at the percentile q and `separation` at 100 - q, as Appendix F.4 of [1] reads them;
    `tail_mass`, the mean attention that falls outside the kept keys, which is the total-variation error, and
    `tail_mass_bound`, the mean of its certificate from the separation [2]; `output_error`, :math:`\lVert A - A_K
    \rVert_F / \lVert A \rVert_F` over all queries with the model's own values (NaN where the model gives scores only);
    `theorem`, which theorem of [1] speaks of the selection; the left-hand sides of the F.4 conditions and the verdicts
    on them, `verdict` in one word where both agree.

    A verdict compares the theorem's constant with that of Theorem 3 for full attention. Theorem 5: equations (276) and
    (277). Theorem 4 has the form of Theorem 3, so that its ratio is :math:`e^{\delta_r - \delta_s}` and both left-hand
    sides are :math:`\delta_r / \delta_s`; it assumes that every key is kept by as many queries, so look at `sink_ratio`
    beside it. "holds": at most that of full attention; "fails"; "limited by precision": the separation is rounding
    noise of the logits; "undefined": a quantity is missing, such as the separation where nothing is left out;
    "reference": full attention itself; "no theorem": none speaks of the selection, and there is no verdict.

    Args:
        model: any torch module.
        batches: as `probes.measure` takes them.
        selections: selections or their short names; full attention is always measured beside them.
        percentile: among 50, 75, 90, 95, 99 and 100.
        name: the model's name in the table; its class where omitted.
        include_padding: count padded queries too.
        progress: show a progress bar; where omitted, only on a terminal.

    Returns:
        One row for each selection and head, with pooled rows for layers and the model (`scope`).

    Raises:
        ValueError: if there is no selection, a name is wrong, the percentile is not one of those, a selection needs
            queries and keys and the model gives scores only, or there is nothing to measure.
    """
    if isinstance(selections, (str, Selection)):
        selections = [selections]
    chosen = list({s.name: s for s in (Full(), *map(parse, selections))}.values())
    if not selections:
        raise ValueError("Expected at least one selection, but got none.")
    if percentile not in PERCENTILES:
        raise ValueError(f"Expected `percentile` among {', '.join(map(str, PERCENTILES))}, but got {percentile!r}.")
    outputs = _Outputs(chosen, include_padding=include_padding)
    with Capture(model, outputs.receive):
        measured = measure(model, batches, chosen, name=name, include_padding=include_padding, progress=progress)
    table = _wide(measured, percentile)
    places = list(zip(table["scope"], table["module"], table["head"], table["selection"], strict=True))
    table["output_error"] = [outputs.error(*place) for place in places]
    table["theorem"] = [
        outputs.theorem(module, kind) for module, kind in zip(table["module"], table["kind"], strict=True)
    ]
    return _judge(table)[list(COLUMNS)]


def parameter_condition(dispersion_full: Any, dispersion: Any, separation: Any) -> NDArray[np.float64]:
    r"""Left-hand side of (276) in [1], :math:`[\delta_h + \ln(2 (1 + 1 / \Delta_h))] / \delta_s`.

    The condition holds where it is at most 1.

    Args:
        dispersion_full: :math:`\delta_s`, of full attention, in nats.
        dispersion: :math:`\delta_h`, of heavy-hitter attention, in nats.
        separation: :math:`\Delta_h`, in nats.

    Returns:
        The left-hand side; +inf at separation 0.
    """
    full, kept, gap = (np.asarray(x, dtype=float) for x in (dispersion_full, dispersion, separation))
    with np.errstate(divide="ignore", invalid="ignore"):
        left: NDArray[np.float64] = (kept + np.log(2) + np.log1p(1 / gap)) / full
    return left


def input_condition(dispersion_full: Any, dispersion: Any, separation: Any, sink_ratio: Any) -> NDArray[np.float64]:
    r"""Left-hand side of (277) in [1] minus its right-hand logarithm; it holds where at most 1.

    :math:`[\delta_h + \ln(\delta_s (1 + \beta)(1 + 1 / \Delta_h) + \beta) - \ln(\delta_s + 1)] / \delta_s`, in which
    :math:`2 \Gamma \Xi^2 = \delta_s`.

    Args:
        dispersion_full: :math:`\delta_s`, of full attention, in nats.
        dispersion: :math:`\delta_h`, of heavy-hitter attention, in nats.
        separation: :math:`\Delta_h`, in nats.
        sink_ratio: :math:`\beta`.

    Returns:
        The left-hand side; +inf at separation 0.
    """
    full, kept, gap, beta = (np.asarray(x, dtype=float) for x in (dispersion_full, dispersion, separation, sink_ratio))
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.log(full * (1 + beta) * (1 + 1 / gap) + beta) - np.log1p(full)
        left: NDArray[np.float64] = (kept + scaled) / full
    return left


class _Outputs:
    """Sums up, over queries, the squared size of each head's output and of its change under each selection."""

    def __init__(self, selections: Sequence[Selection], *, include_padding: bool) -> None:
        self._selections = selections
        self._include_padding = include_padding
        self._sums: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros((2, 1)))  # change, size
        self._own: dict[str, Kind] = {}

    def receive(self, call: AttentionCall) -> None:
        self._own[call.module_name] = "full" if call.selection is None else call.selection.kind
        if call.value is None or call.value.shape[-2] != call.shape[3]:
            return
        batch, heads, queries, keys = call.shape
        value = call.value if call.value.dtype == torch.float64 else call.value.float()
        value = value.repeat_interleave(heads // value.shape[1], dim=1) if value.shape[1] != heads else value
        rows = max(1, BLOCK // max(1, batch * heads * keys))
        for start in range(0, queries, rows):
            index = slice(start, min(start + rows, queries))
            logits, allowed = call.logits(index), call.allowed(index)
            full = _output(call, logits, allowed, value)
            counted = allowed.any(-1)
            if call.queries is not None and not self._include_padding:
                counted = counted & call.queries[:, None, index]
            size = _squares(full, counted)
            for selection in self._selections:
                kept = selection.keep(logits, allowed, start=start, call=call)
                change = _squares(_output(call, logits, kept, value) - full, counted)
                sums = np.stack([change, size])
                self._sums[call.module_name, selection.name] = self._sums[call.module_name, selection.name] + sums

    def error(self, scope: str, module: str, head: Any, selection: str) -> float:
        if scope == "model":
            parts = [sums.sum(1) for (_, name), sums in self._sums.items() if name == selection]
            sums = np.sum(parts, axis=0) if parts else np.zeros(2)
        elif (module, selection) not in self._sums:
            return float("nan")
        else:
            sums = self._sums[module, selection]
            sums = sums[:, int(head)] if scope == "head" else sums.sum(1)
        return float(np.sqrt(sums[0] / sums[1])) if sums[1] > 0 else float("nan")

    def theorem(self, module: str, kind: Kind) -> str:
        if kind != "observed":
            return THEOREM[kind]
        kinds = {own for name, own in self._own.items() if not module or name == module}
        return THEOREM[kinds.pop()] if len(kinds) == 1 else THEOREM["input-dependent"]


def _output(call: AttentionCall, logits: Tensor, kept: Tensor, value: Tensor) -> Tensor:
    logits = logits.masked_fill(~kept, -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    if call.sinks is not None:
        total = total.logaddexp(call.sinks.to(total.dtype)[None, :, None, None])
    return (logits - total).exp().nan_to_num(0.0) @ value


def _squares(output: Tensor, counted: Tensor) -> NDArray[np.float64]:
    squares = output.double().square().sum(-1).masked_fill(~counted, 0.0)  # (batch, head, query)
    return np.asarray(squares.sum((0, 2)).cpu().numpy())


def _wide(measured: pd.DataFrame, percentile: int) -> pd.DataFrame:
    high, low = ("max", "min") if percentile == 100 else (f"p{percentile}", f"p{100 - percentile}")
    rows = {metric: part.set_index([*_PLACE, "selection"]) for metric, part in measured.groupby("metric")}
    table = rows["kept"][["model", "kind", "keys"]].copy()
    sources = {
        "dispersion": high,
        "separation": low,
        "sink_ratio": high,
        "tail_mass": "mean",
        "tail_mass_bound": "mean",
    }
    for metric, column in sources.items():
        table[metric] = rows[metric][column]
    table["largest"] = rows["max_abs_logit"]["max"]
    table = table.reset_index()
    full = table.loc[table["selection"] == "full", [*_PLACE, "keys", "dispersion", "largest"]]
    full = full.rename(columns={"keys": "allowed", "dispersion": "dispersion_full", "largest": "largest_full"})
    table = table.merge(full, on=_PLACE, how="left")
    table["kept_share"] = table["keys"] / table["allowed"]
    table["percentile"] = percentile
    return table


def _judge(table: pd.DataFrame) -> pd.DataFrame:
    full, kept, gap, beta = (
        table[name].to_numpy(float) for name in ("dispersion_full", "dispersion", "separation", "sink_ratio")
    )
    theorem = table["theorem"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        regular = kept / full
    noise = gap <= RESOLUTION * np.maximum(table["largest_full"].to_numpy(float), 1.0)
    for name, heavy in (
        ("parameter", parameter_condition(full, kept, gap)), ("input", input_condition(full, kept, gap, beta))
    ):  # fmt: skip
        left = np.select([theorem == "Theorem 5", theorem == "Theorem 4"], [heavy, regular], np.nan)
        verdict = np.select(
            [
                theorem == THEOREM["full"],
                theorem == THEOREM["control"],
                np.isnan(left),
                (theorem == THEOREM["heavy-hitter"]) & noise,
                left <= 1,
            ],
            ["reference", "no theorem", "undefined", "limited by precision", "holds"],
            "fails",
        )
        table[f"{name}_condition"] = left
        table[f"verdict_{name}"] = verdict
    parameter, both = table["verdict_parameter"], table["verdict_parameter"] == table["verdict_input"]
    table["verdict"] = parameter.where(both, "parameter: " + parameter + "; input: " + table["verdict_input"])
    return table
