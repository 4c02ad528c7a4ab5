"""The region figures: where Appendix F.4's conditions hold (the paper's Figures 21 and 22).

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Appendix F.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theory.comparison import Condition, input, parameter, region_boundary

DISPERSIONS = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 32.0)
SINK_RATIOS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_MARKS = ("-", "--", "-.", ":")
_LIMITS = (1e-8, 1e3)


def region(
    condition: Condition, *, dispersions: Sequence[float] = DISPERSIONS, precision: float = 1e-4, **arguments: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Evaluate the boundary of one region figure.

    Args:
        condition: an inequality of Appendix F.4.
        dispersions: values of full attention's dispersion, in nats.
        precision: spacing of c1 within (0, 1).
        **arguments: what else the condition depends on, such as `sink_ratio`.

    Returns:
        c1, shape (points,), and the smallest c2 at which the condition holds, shape (dispersions, points),
        +inf where there is none.

    Raises:
        ValueError: if `precision` doesn't lie in (0, 1).
    """
    if not 0 < precision < 1:
        raise ValueError(f"Expected `precision` to lie between 0 and 1, but got {precision:g}.")
    ratio = np.arange(1.0, max(2, round(1 / precision))) * precision
    full = np.asarray(dispersions, dtype=np.float64)[:, None]
    return ratio, region_boundary(condition, dispersion_ratio=ratio, dispersion_full=full, **arguments)


def plot_region(
    condition: Condition,
    *,
    ax: Any = None,
    dispersions: Sequence[float] = DISPERSIONS,
    precision: float = 1e-4,
    **arguments: float,
) -> Any:
    """Draw, for each dispersion of full attention, the smallest c2 at which a condition holds.

    Args:
        condition: an inequality of Appendix F.4.
        ax: matplotlib Axes to draw on; new ones where omitted.
        dispersions: values of full attention's dispersion, in nats.
        precision: spacing of c1.
        **arguments: what else the condition depends on, such as `sink_ratio`.

    Returns:
        The Axes. The condition holds on and above a line; a dispersion for which it holds nowhere is named so in the
        legend.
    """
    import matplotlib as mpl

    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(6, 4.5), layout="constrained").add_subplot()
    ratio, boundary = region(condition, dispersions=dispersions, precision=precision, **arguments)
    shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.85, len(dispersions)))
    for index, (dispersion, line) in enumerate(zip(dispersions, boundary, strict=True)):
        holds = np.isfinite(line)
        label = rf"$\delta_s$ = {dispersion:g}" + ("" if holds.any() else " (nowhere)")
        style = {"color": shades[index], "linestyle": _MARKS[index % len(_MARKS)], "label": label}
        # The boundary is a vertical asymptote where the condition stops to hold; it is drawn up to the edge.
        edge = ~holds & np.roll(holds, 1) & (np.arange(len(line)) > 0)
        ax.plot(ratio, np.where(holds, line, np.where(edge, 10 * _LIMITS[1], np.nan)), **style)
    ax.set(
        xlim=(0, 1),
        ylim=_LIMITS,
        yscale="log",
        xlabel=r"$c_1 = \delta_h / \delta_s$ (dispersion, top-k to full)",
        ylabel=r"smallest $c_2 = \Delta_h / \delta_s$ at which it holds",
    )
    ax.grid(visible=True, alpha=0.3)
    return ax


def parameter_figure(*, precision: float = 1e-4) -> Any:
    """Draw the region in which parameter stability gains (equation 276; the paper's Figure 21).

    Args:
        precision: spacing of c1.

    Returns:
        A matplotlib Figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    ax = plot_region(parameter, ax=figure.add_subplot(), precision=precision)
    ax.set_title("Parameter stability, (276): the condition holds on and above each line")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def input_figure(*, precision: float = 1e-4, sink_ratios: Sequence[float] = SINK_RATIOS) -> Any:
    """Draw the regions in which input stability gains (equation 277; the paper's Figure 22), one panel per sink ratio.

    Args:
        precision: spacing of c1.
        sink_ratios: values of beta.

    Returns:
        A matplotlib Figure.
    """
    from matplotlib.figure import Figure

    columns = min(3, len(sink_ratios))
    rows = -(-len(sink_ratios) // columns)
    figure = Figure(figsize=(4 * columns + 1.5, 3.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax, sink_ratio in zip(panels.flat, sink_ratios, strict=False):
        plot_region(input, ax=ax, precision=precision, sink_ratio=sink_ratio)
        nowhere = [line.get_label().split()[2] for line in ax.lines if line.get_label().endswith("(nowhere)")]
        note = rf"; nowhere for $\delta_s$ = {', '.join(nowhere)}" if nowhere else ""
        ax.set_title(rf"$\beta$ = {sink_ratio:g}{note}", fontsize="medium")
    for ax in panels.flat[len(sink_ratios) :]:
        ax.set_visible(False)
    for ax in panels[:-1].flat:
        ax.set_xlabel("")
    for ax in panels[:, 1:].flat:
        ax.set_ylabel("")
    handles = panels.flat[0].lines
    labels = [line.get_label().removesuffix(" (nowhere)") for line in handles]
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(
        r"Input stability, (277) with $2\Gamma\Xi^2 = \delta_s$: the condition holds on and above each line"
    )
    return figure
