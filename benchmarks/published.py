"""Times that others published, beside what the planner predicts: a sanity check of its rates and its simulation.

    python benchmarks/published.py --plot docs/published.png

FLUX.1-dev, 1024 x 1024, 28 steps, on an NVIDIA L20 (cache-dit's table). Two rows are used to fit what a sheet doesn't
say: how much of the peak the kernels reach (the resident row) and how much of the link the copies reach (the row of
4 GiB). The other rows follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import add_repository_to_path

add_repository_to_path()

from diffusers_layerwise import Hardware, plan_layerwise_offload  # noqa: E402
from diffusers_layerwise.rivals import rivals  # noqa: E402
from test_published import PIPELINES, write  # noqa: E402

#: NVIDIA's L20 sheet: 48 GB, 864 GB/s, 119.5 dense TFLOP/s in bfloat16, 59.8 in float32, PCIe 4.0 x16.
PEAK, MEMORY = 119.5e12, 864e9
#: cache-dit's table: (how, GiB at the peak, seconds of a call).
RESIDENT = ("resident", 38.0, 24.0)
LAYERWISE = (("layerwise", 4.0, 41.0), ("layerwise", 8.0, 33.0), ("layerwise", 14.0, 26.0))
OTHERS = (("model offload", 25.0, 56.0), ("sequential offload", 1.0, 335.0))
STEPS = 28


def device(share: float, link: float) -> Hardware:
    """An L20 whose kernels reach a share of its peaks, and whose link so many bytes per second."""
    matmul = {"bfloat16": PEAK * share, "float16": PEAK * share, "float32": PEAK * share / 2}
    rates = (PEAK * share * 0.75, MEMORY * min(1.0, share))
    return Hardware("L20", 48 << 30, link, link * 0.3, matmul, *rates, 3e9, 5e-6, "NVIDIA L20 sheet, fitted")


def seconds(folder: Path, hardware: Hardware, gib: float) -> float:
    """A call's predicted seconds at a budget."""
    call = {"height": 1024, "width": 1024, "num_inference_steps": STEPS}
    plan = plan_layerwise_offload(
        folder, memory_budget=int(gib * 2**30), hardware=hardware, dtype="bf16", mode="auto", **call
    )
    return plan.total_seconds


def fitted(goal: float, low: float, high: float, of: Callable[[float], float]) -> float:
    """The argument at which a falling function has a value."""
    while high / low > 1.002:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if of(middle) > goal else (low, middle)
    return (low * high) ** 0.5


@dataclasses.dataclass
class Row:
    """One line of the table."""

    how: str
    gib: float
    published: float
    predicted: float
    fitted: bool

    def __str__(self) -> str:
        note = "fitted" if self.fitted else f"{self.predicted / self.published:.2f}"
        return f"{self.how:<20} {self.gib:>6.1f} GiB {self.published:>8.1f} s {self.predicted:>8.1f} s  {note}"


def table(folder: Path) -> tuple[Hardware, list[Row]]:
    """The device as fitted, and all rows."""
    share = fitted(RESIDENT[2], 0.3, 3.0, lambda s: seconds(folder, device(s, 22e9), 40.0))
    link = fitted(LAYERWISE[0][2], 2e9, 30e9, lambda rate: seconds(folder, device(share, rate), LAYERWISE[0][1]))
    made = device(share, link)
    rows = [Row(*RESIDENT, seconds(folder, made, 40.0), True)]
    rows += [Row(how, gib, took, seconds(folder, made, gib), gib == 4.0) for how, gib, took in LAYERWISE]
    plan = plan_layerwise_offload(
        folder, memory_budget="40GiB", hardware=made, dtype="bf16", height=1024, width=1024, num_inference_steps=STEPS
    )
    assert plan.problem is not None
    ways = {rival.name: rival.total_seconds for rival in rivals(plan.problem)}
    rows += [Row(how, gib, took, ways[how], False) for how, gib, took in OTHERS]
    return made, rows


def draw(rows: list[Row], path: Path) -> None:
    """Seconds against memory, published and predicted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = sorted((r for r in rows if r.how in ("layerwise", "resident")), key=lambda r: r.gib)
    figure, axes = plt.subplots(figsize=(6, 3.6))
    gib = [row.gib for row in shown]
    axes.plot(gib, [row.published for row in shown], "o-", label="published (cache-dit)")
    axes.plot(gib, [row.predicted for row in shown], "s--", label="predicted")
    axes.set(xlabel="device memory, GiB", ylabel="seconds of a call", ylim=(0, None), title="FLUX.1-dev, 28 steps, L20")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    parser.add_argument("--plot", type=Path, help="draw them (needs matplotlib)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "pipe"
        write(PIPELINES["FLUX.1-dev"], folder)
        made, rows = table(folder)
    print(f"fitted: {made.matmul['bfloat16'] / PEAK:.2f} of the peak, link {made.pinned / 1e9:.1f} GB/s")
    print(f"{'':<20} {'memory':>10} {'published':>10} {'predicted':>10}  ratio")
    print(*rows, sep="\n")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    if options.plot:
        draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
