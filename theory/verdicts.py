"""Appendix F.4 on measurement tables: which heads, layers and models satisfy the inequalities, and by how much.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Appendix F.4.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from theory import comparison
from theory.flip import flips

KEYS = ["scope", "module", "layer", "head"]
QUANTITIES = ["dispersion_full", "dispersion", "separation", "sink_ratio"]
# Dispersion and sink ratio are taken at the percentile, separation at its mirror image.
COLUMNS = {
    50: ("p50", "p50"),
    75: ("p75", "p25"),
    90: ("p90", "p10"),
    95: ("p95", "p5"),
    99: ("p99", "p1"),
    100: ("max", "min"),
}
FLOAT32 = 2.0**-23
_CALLED = {
    "dispersion_full": "the dispersion of full attention",
    "dispersion": "the dispersion of heavy-hitter attention",
    "separation": "its separation",
    "sink_ratio": "its sink ratio",
}


def compare(
    *,
    full: pd.DataFrame,
    heavy_hitter: pd.DataFrame,
    percentiles: Sequence[int] = (75, 90, 95, 100),
    relative_resolution: float = FLOAT32,
) -> pd.DataFrame:
    """Evaluate the two conditions of Appendix F.4 on the measurement tables of a pair of models.

    At the percentile q, the dispersions and the sink ratio are those at q and the separation that at 100 - q. Rows are
    matched by scope, module, layer and head. Of each table the rows of the kind that is needed are read, so one that
    also holds other kinds of selection will do.

    Args:
        full: measurement table of full attention.
        heavy_hitter: measurement table of heavy-hitter attention, such as top-k.
        percentiles: among 50, 75, 90, 95, 99 and 100.
        relative_resolution: spacing of the numbers that the logits were computed in, relative to their size. A
            separation of at most this times the largest absolute logit (where the table has none: the largest
            dispersion; at least 1) is rounding noise, and the verdict says so.

    Returns:
        One row per matched row, percentile and condition: `scope`, `module`, `layer`, `head`, `percentile`, `condition`
        ("parameter" or "input"), `left_hand_side`, `right_hand_side`, `margin` (right minus left), `verdict` ("holds",
        "fails", "limited by precision" or "undefined"), the four quantities used, `resolution` of the separation,
        `flip_quantity`, `flip_from`, `flip_to` and `flip_change` (the smallest change by a factor of one quantity that
        turns the inequality around; `flip_dispersion_full` and so on give the turning point of each), and `words`.

    Raises:
        ValueError: if a table lacks a column or a metric, holds the wrong kind or more than one selection or model of
            the right one, or if no rows match.
    """
    unknown = [q for q in percentiles if q not in COLUMNS]
    if unknown or not len(percentiles):
        raise ValueError(f"Expected `percentiles` among {', '.join(map(str, COLUMNS))}, but got {list(percentiles)}.")
    dense = _select(full, "full", "full", ["dispersion"], percentiles)
    sparse = _select(
        heavy_hitter, "heavy_hitter", "heavy-hitter", ["dispersion", "separation", "sink_ratio"], percentiles
    )
    measured = _match(dense, sparse, percentiles, relative_resolution)
    if measured.empty:
        raise ValueError(
            "Expected `full` and `heavy_hitter` to share rows with the same scope, module, layer and head, but none "
            "match; measure two models of the same shape."
        )
    parts = [_judge(measured, condition) for condition in (comparison.parameter, comparison.input)]
    table = pd.concat(parts, ignore_index=True)
    order = {"model": 0, "layer": 1, "head": 2}
    table = table.sort_values(
        [*KEYS, "percentile"],
        key=lambda column: column.map(order) if column.name == "scope" else column,
        kind="stable",
        na_position="first",
    )
    table["words"] = [_words(row) for row in table.to_dict("records")]
    return table.reset_index(drop=True)


def _select(
    table: pd.DataFrame, argument: str, kind: str, metrics: list[str], percentiles: Sequence[int]
) -> pd.DataFrame:
    # Check one table and keep the rows of its only selection of this kind.
    if not isinstance(table, pd.DataFrame):
        raise ValueError(
            f"Expected `{argument}` to be a measurement table (a pandas DataFrame), but got {type(table).__name__}."
        )
    needed = dict.fromkeys(
        [*KEYS, "selection", "kind", "metric", "max", *(name for q in percentiles for name in COLUMNS[q])]
    )
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise ValueError(
            f"Expected `{argument}` to be a measurement table, but it lacks the columns {', '.join(missing)}; "
            "make it with probes.measure."
        )
    rows = table[table["kind"] == kind]
    if rows.empty:
        kinds = ", ".join(sorted({str(value) for value in table["kind"]})) or "nothing"
        raise ValueError(
            f"Expected `{argument}` to hold a selection of kind {kind!r}, but it holds {kinds}; "
            "measure one or swap the tables."
        )
    for column in ("selection", "model"):
        names = sorted({str(value) for value in rows[column]}) if column in rows else []
        if len(names) > 1:
            raise ValueError(
                f"Expected `{argument}` to hold one {column} of kind {kind!r}, but it holds "
                f"{', '.join(names)}; keep the rows of one."
            )
    absent = [metric for metric in metrics if metric not in set(rows["metric"])]
    if absent:
        raise ValueError(
            f"Expected `{argument}` to hold the metrics {', '.join(metrics)}, but got no {', '.join(absent)}; "
            "measure them."
        )
    rows = rows[rows["metric"].isin([*metrics, "max_abs_logit"])]
    twice = rows[rows.duplicated([*KEYS, "metric"])]
    if len(twice):
        row = twice.iloc[0]
        raise ValueError(
            f"Expected one row per scope, module, layer, head and metric in `{argument}`, but got "
            f"{row['metric']} of {row['module']!r} twice."
        )
    return rows.assign(
        layer=rows["layer"].astype("Int64"),
        head=rows["head"].astype("Int64"),
        module=rows["module"].fillna("").astype(str),
    )


def _match(dense: pd.DataFrame, sparse: pd.DataFrame, percentiles: Sequence[int], relative: float) -> pd.DataFrame:
    # Put the four quantities side by side, one row per matched row and percentile.
    def column(table: pd.DataFrame, metric: str, source: str, name: str) -> pd.DataFrame:
        rows = table.loc[table["metric"] == metric, [*KEYS, source]]
        return rows.rename(columns={source: name}).astype({name: float})

    parts = []
    for q in percentiles:
        high, low = COLUMNS[q]
        part = column(dense, "dispersion", high, "dispersion_full")
        for metric, source in (("dispersion", high), ("separation", low), ("sink_ratio", high)):
            part = part.merge(column(sparse, metric, source, metric), on=KEYS, how="inner")
        part = part.merge(column(sparse, "dispersion", "max", "_spread"), on=KEYS, how="left")
        part = part.merge(column(sparse, "max_abs_logit", "max", "_largest"), on=KEYS, how="left")
        part.insert(len(KEYS), "percentile", q)
        size = part["_largest"].fillna(part["_spread"]).fillna(0).clip(lower=1)
        parts.append(part.assign(resolution=relative * size).drop(columns=["_spread", "_largest"]))
    return pd.concat(parts, ignore_index=True)


def _judge(measured: pd.DataFrame, condition: comparison.Condition) -> pd.DataFrame:
    # Evaluate one condition on every row.
    quantities = {name: measured[name].to_numpy(float) for name in QUANTITIES}
    arguments = {str(symbol): quantities[str(symbol)] for symbol in condition.symbols}
    left = condition.left_hand_side(**arguments)
    verdict = np.where(left <= 1, "holds", "fails").astype(object)
    verdict[measured["separation"] <= measured["resolution"]] = "limited by precision"
    verdict[np.isnan(left)] = "undefined"
    turning = flips(condition, arguments)
    now = np.stack([quantities[name] for name in turning])  # (quantity, row)
    then = np.stack(list(turning.values()))
    with np.errstate(all="ignore"):
        effort = np.abs(np.log(then) - np.log(now))
    effort = np.where(np.isfinite(effort), effort, np.inf)
    best, rows = effort.argmin(0), np.arange(len(measured))
    possible = np.isfinite(effort[best, rows])
    name = np.where(possible, np.array(list(turning), dtype=object)[best], None)
    start, end = (np.where(possible, values[best, rows], np.nan) for values in (now, then))
    table = measured[[*KEYS, "percentile"]].assign(
        condition=condition.name.split("-")[1],
        left_hand_side=left,
        right_hand_side=1.0,
        margin=1.0 - left,
        verdict=verdict.astype(str),
        **{quantity: measured[quantity] for quantity in QUANTITIES},
        resolution=measured["resolution"],
        flip_quantity=np.asarray(name, dtype=object),
        flip_from=start,
        flip_to=end,
        flip_change=end - start,
    )
    return table.assign(**{f"flip_{quantity}": turning.get(quantity, np.nan) for quantity in QUANTITIES})


def _words(row: dict[Hashable, Any]) -> str:
    # Say one verdict in plain words.
    place = {
        "model": "Over the whole model",
        "layer": f"In layer {row['layer']}",
        "head": f"In layer {row['layer']}, head {row['head']}",
    }.get(str(row["scope"]), f"For scope {row['scope']}")
    about = f"{place}, at the {row['percentile']}th percentile"
    left, separation = row["left_hand_side"], row["separation"]
    if row["verdict"] == "undefined":
        missing = [_CALLED[name] for name in QUANTITIES if np.isnan(row[name])]
        return f"{about}, the {row['condition']} condition can't be judged: {', '.join(missing)} is undefined."
    if row["verdict"] == "limited by precision":
        return (
            f"{about}, the {row['condition']} condition can't be judged: the separation {separation:.3g} is at most "
            f"the resolution {row['resolution']:.2g} of the logits (left-hand side {left:.4g} as computed, against 1)."
        )
    holds = row["verdict"] == "holds"
    said = (
        f"{about}, the {row['condition']}-stability bound of heavy-hitter attention is "
        f"{'at most' if holds else 'above'} that of full attention: "
        f"left-hand side {left:.4g} {'<=' if holds else '>'} 1."
    )
    if not isinstance(row["flip_quantity"], str):
        return f"{said} No change of one quantity alone would turn it around."
    return (
        f"{said} It would {'fail' if holds else 'hold'} if {_CALLED[str(row['flip_quantity'])]} went from "
        f"{row['flip_from']:.4g} to {row['flip_to']:.4g}."
    )
