"""A pass as a picture by matplotlib, which the `[plot]` extra installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import LayerwiseOffloadError
from .lanes import Lanes, Span, clipped, longest, merged, short
from .page import byte_ticks, top_of

#: Inches and dots per inch.
SIZE, DOTS = (13.0, 6.2), 130
#: Pixels below which neighbours are drawn as one.
FINEST = 1.5
RUN, COPY = ("#2f6db3", "#6ea3dc"), ("#1a7f5a", "#5bb893")
GAP, STALL, WEIGHTS, HELD, TENSORS = "#d0d7de", "#d1242f", "#8250df", "#57606a", "#bc6c00"
MOST_LABELS, APART = 10, 0.09


def draw(lanes: Lanes, path: Path) -> None:
    """Writes the picture in the format that the path's suffix names.

    Raises:
        LayerwiseOffloadError: matplotlib isn't installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LayerwiseOffloadError(
            f"{path.name} needs matplotlib: pip install 'diffusers-layerwise[plot]'. timeline.save('step.html') and "
            f"timeline.save('step.svg') need nothing."
        ) from error
    # No pyplot: its state and its windows are the user's.
    figure = Figure(figsize=SIZE, dpi=DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.1))
    # Names are no formulas: matplotlib would read what is between two "$" as TeX.
    figure.suptitle(lanes.title, fontsize=11, parse_math=False)
    _draw_lanes(upper, lanes)
    _draw_memory(lower, lanes)
    lower.set_xlim(0, lanes.seconds * 1e3 or 1.0)
    lower.set_xlabel("milliseconds")
    figure.savefig(path)


def _draw_lanes(axis: Any, lanes: Lanes) -> None:
    finest = lanes.seconds * FINEST / (SIZE[0] * DOTS)
    rows = [
        (1, lanes.others, (GAP,), "other work, or none"),
        (1, lanes.compute, RUN, "groups of layers"),
        (0, lanes.copies, COPY, "copies"),
        (1, lanes.stalls, (STALL,), "waiting for a copy"),
    ]
    for row, spans, colours, label in rows:
        inside = clipped(spans, lanes.seconds)
        shown, alone = merged(inside, finest), set(inside)
        if not shown:
            continue  # the legend would show its words without a colour
        axis.broken_barh(
            [(span.start * 1e3, span.seconds * 1e3) for span in shown],
            (row - 0.35, 0.7),
            facecolors=[colours[i % len(colours) if span in alone else 0] for i, span in enumerate(shown)],
            linewidth=0,
            label=label,
        )
        if label in ("groups of layers", "copies"):
            _name(axis, row, inside, lanes.seconds)
    for index, span in enumerate(longest(lanes.stalls, MOST_LABELS, APART * lanes.seconds)):
        at = 1e3 * (span.start + span.stop) / 2
        text = f"{short(span.name, 20)}\n{span.seconds * 1e3:.2f} ms"
        axis.annotate(
            text,
            (at, 1.35),
            (min(max(at, 45 * lanes.seconds), 955 * lanes.seconds), 1.5 + 0.32 * (index % 2)),
            fontsize=7,
            color=STALL,
            ha="center",
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": STALL, "linewidth": 0.6},
        )
    axis.set_ylim(-0.5, 2.25 if lanes.stalls else 1.5)
    axis.set_yticks([0, 1], ["copying", "computing"])
    axis.tick_params(left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    _legend(axis)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:  # matplotlib warns where there is nothing to name
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)


def _name(axis: Any, row: int, shown: list[Span], seconds: float) -> None:
    """Writes names into the bars that have room for one."""
    for span in shown:
        room = int(span.seconds / seconds * 190)
        if room >= 8:
            axis.text(
                1e3 * (span.start + span.stop) / 2,
                row,
                short(span.name, room),
                fontsize=7,
                color="white",
                ha="center",
                va="center",
                parse_math=False,
            )


def _draw_memory(axis: Any, lanes: Lanes) -> None:
    at = [sample.at * 1e3 for sample in lanes.memory] + [lanes.seconds * 1e3]

    def stairs(values: list[int]) -> list[int]:
        return [*values, values[-1]] if values else []

    if lanes.memory:
        weights = stairs([sample.weights for sample in lanes.memory])
        axis.fill_between(
            at, weights, step="post", color=WEIGHTS, alpha=0.35, linewidth=0, label="weights there or arriving"
        )
        held = stairs([sample.held for sample in lanes.memory])
        axis.step(at, held, where="post", color=HELD, linewidth=1.3, label="held for weights")
    known = [sample for sample in lanes.memory if sample.allocated is not None]
    if known:
        tensors = stairs([sample.allocated or 0 for sample in known])
        times = [sample.at * 1e3 for sample in known] + [lanes.seconds * 1e3]
        axis.step(times, tensors, where="post", color=TENSORS, linewidth=1.3, label="all tensors")
    most = top_of(lanes)
    if lanes.budget is not None and lanes.budget <= most:
        axis.axhline(lanes.budget, color=STALL, linestyle="--", linewidth=1.2, label="budget")
    axis.set_ylim(0, most * 1.06)
    values, texts = zip(*byte_ticks(most), strict=True)
    axis.set_yticks(values, texts)
    axis.set_ylabel("device memory")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    _legend(axis)
