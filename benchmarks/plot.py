"""Draws step time against the device memory that weights take, one panel per model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "diffusers_layerwise"  # the same rows draw the same file
import matplotlib.pyplot as plt  # noqa: E402

OURS, BOUND = "#0b6e4f", "#9a9a9a"
PEERS = (("diffusers block + stream", "o", "#c1121f"), ("diffusers block + stream + record_stream", "o", "#f4978e"),
         ("diffusers leaf + stream", "s", "#1d4ed8"), ("diffusers leaf + stream + record_stream", "s", "#93b4f5"),
         ("accelerate sequential", "^", "#7c3aed"), ("resident (.to)", "D", "#222222"))  # fmt: skip


def draw(rows: list[dict[str, Any]], titles: dict[str, str], path: Path) -> list[Path]:
    """Write `path` and its sibling with the other suffix (.png and .svg)."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 4.1 * lines), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for name, axis in zip(names, axes.flat, strict=False):
        _panel(axis, [row for row in rows if row["model"] == name and not row["error"]], titles[name])
    pairs = [pair for axis in axes.flat for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in pairs}
    across = min(2 * columns, 4)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=across, frameon=False, fontsize=8)
    rows_of_legend = -(-len(handles) // across)
    figure.tight_layout(rect=(0, (0.1 + 0.22 * rows_of_legend) / (4.1 * lines), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(written[0], dpi=130, metadata={"Software": None})
    figure.savefig(written[1], metadata={"Date": None})
    plt.close(figure)
    return written


def _panel(axis: Any, rows: list[dict[str, Any]], title: str) -> None:
    if not rows:
        return
    ratio = rows[0]["weights"] / rows[0]["bandwidth"] / rows[0]["compute_s"]
    shares = [index / 200 for index in range(1, 201)]
    axis.plot([100 * s for s in shares], [max(1.0, (1 - s) * ratio) for s in shares], "--", color=BOUND, lw=1,
              label="bound: max(compute, (weights - peak) / bandwidth)")  # fmt: skip
    for residency, style in (("", "-"), ("lasting", "-"), ("use", ":")):
        mine = sorted((r for r in rows if r["ours"] and r["residency"] == residency), key=lambda r: r["of_weights"])
        label = "ours" + (", cold start each time" if residency == "use" else "")
        if mine:
            axis.plot([100 * r["of_weights"] for r in mine], [r["of_compute"] for r in mine], style, marker="*",
                      markersize=10, color=OURS, label=label)  # fmt: skip
    for method, marker, colour in PEERS:
        for row in rows:
            if row["method"] == method:
                size = 4 if "record" in method else 7  # the two often coincide
                axis.plot([100 * row["of_weights"]], [row["of_compute"]], marker, color=colour, ls="", label=method,
                          markersize=size)  # fmt: skip
    axis.set(title=title, xlabel="peak device memory of weights, % of the weights", ylabel="step time / compute only",
             xscale="log", yscale="log")  # fmt: skip
    axis.xaxis.set_major_formatter("{x:g}")
    ticks = [tick for tick in (1, 1.25, 1.5, 2, 3, 4, 5, 8, 12, 20, 32) if tick <= 1.1 * axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
