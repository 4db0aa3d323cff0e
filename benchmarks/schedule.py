"""Step time against device memory, for every way to run a model, on the simulated device's virtual clock.

    python benchmarks/schedule.py                          # all models, all budgets
    python benchmarks/schedule.py --models flux,sdxl --budgets 5,10 --quick
    python benchmarks/schedule.py --json schedule.json --plot docs/schedule.png

`models.py` says how the models and the clock are scaled; README.md what the columns mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from measure import (
    Forward,
    MemoryTrace,
    Passes,
    chrome_trace,
    in_use,
    load_sim,
    run_passes,
    trace_memory,
    versions,
    weight_peak,
)

sim = load_sim()  # before diffusers

import torch  # noqa: E402
from diffusers.utils import logging  # noqa: E402
from torch import nn  # noqa: E402

from bounds import Uses, order_bound, simple_bound, trace_uses  # noqa: E402
from methods import Attached, Method, layerwise, peers, resident  # noqa: E402
from models import CASES, ModelCase, build, make_inputs, weight_bytes  # noqa: E402

BUDGETS = (5.0, 10.0, 25.0, 50.0, 75.0, 100.0)
SMALLEST_BUDGET = 0.05  # no promise below: a few of the largest modules fill it
RESIDENT_TARGET = 1.01  # all resident: no slower than plain .to() + 1 %


@dataclasses.dataclass
class Row:
    """One method on one model. Seconds are virtual; `of_*` are ratios."""

    model: str
    method: str
    ours: bool
    weights: int
    compute_s: float  # a pass of the resident model
    bandwidth: float  # bytes per virtual second
    budget: float | None = None  # share of the weights
    residency: str = ""
    step_s: float = 0.0
    of_compute: float = 0.0
    peak: int = 0  # device bytes of weights (slots included) at the worst moment
    of_weights: float = 0.0
    activations: int = 0
    bound_s: float = 0.0
    of_bound: float = 0.0
    order_bound_s: float = 0.0  # the bound that knows the order of layers
    of_order_bound: float = 0.0
    host_syncs: float = 0.0  # per pass
    copies: float = 0.0  # per pass
    of_copied: float = 0.0  # bytes copied per pass / weights
    copy_busy: float = 0.0  # share of the step in which the copy engine works
    identical: bool = False  # the output's bits are those of the resident model
    target: float | None = None
    plan: Any = None
    error: str = ""

    @property
    def missed(self) -> bool:
        """Whether a promise of ours is broken here."""
        if not self.ours:
            return False
        over = self.target is not None and self.of_bound > self.target
        large = self.budget is not None and self.peak > max(1, round(self.budget * self.weights))
        return bool(self.error) or over or large or not self.identical


@dataclasses.dataclass
class Bench:
    """A model on its clock, with the resident run that the others are compared with."""

    case: ModelCase
    quick: bool
    trace_dir: Path | None
    weights: int = 0
    bandwidth: float = 0.0
    base: Passes | None = None
    base_trace: MemoryTrace | None = None
    uses: Uses | None = None

    def run(self, method: Method) -> Row:
        """Measure one method; the first must be the resident one, which sets the link."""
        floor, device = in_use(sim), torch.device("sim")
        module, inputs = build(self.case), make_inputs(self.case, device)
        self.weights = weight_bytes(module)
        sim.configure(mode="raise" if method.ours else "off")  # races in ours are errors
        row = Row(self.case.name, method.name, method.ours, self.weights, 0.0, self.bandwidth, method.budget,
                  method.residency)  # fmt: skip
        attached = Attached()
        try:
            attached = method.attach(module, self.case.block_root, device)
            forward = Forward(lambda: module(**inputs), self.case.one_pass, attached.end_use, floor)
            self._measure(row, module, forward)
            row.plan = describe(attached)
            attached.remove()
        except ImportError:
            raise
        except Exception as error:  # a refusal is a result
            row.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        sim.configure(mode="off")
        return row

    def _measure(self, row: Row, module: nn.Module, forward: Forward) -> None:
        stem = f"{row.model}-{row.method}".replace(" ", "_").replace("%", "pct").replace("+", "").replace("(.to)", "")
        with chrome_trace(sim, self.trace_dir and self.trace_dir / f"{stem}.json"):
            passes = run_passes(sim, forward, 1 if self.quick else 2)
        trace = trace_memory(sim, forward)
        if self.base is None or self.base_trace is None or self.uses is None:
            self.base, self.base_trace, self.uses = passes, trace, trace_uses(sim, module, forward)
            self.bandwidth = self.weights / (self.case.ratio * passes.seconds)
            sim.configure(**self.case.link(self.bandwidth))
            row.bandwidth = self.bandwidth
        fill(row, passes, self.base, weight_peak(trace, self.base_trace, self.weights))
        self._bound(row)

    def _bound(self, row: Row) -> None:
        """How near the step is to what is possible with this peak."""
        assert self.uses is not None
        # A use that starts with nothing on the device has to carry all weights, however much memory there is.
        memory = 0 if row.residency == "use" else row.peak
        row.bound_s = simple_bound(row.compute_s, row.weights, memory, row.bandwidth)
        ordered = order_bound(self.uses, memory, row.bandwidth, not self.case.one_pass)
        row.order_bound_s = max(row.bound_s, ordered)
        row.of_bound, row.of_order_bound = row.step_s / row.bound_s, row.step_s / row.order_bound_s
        if row.budget == 1.0 and row.residency != "use":
            row.target = RESIDENT_TARGET
        elif row.budget is not None and row.budget >= SMALLEST_BUDGET:
            row.target = self.case.target


def fill(row: Row, passes: Passes, base: Passes, traced_peak: int) -> None:
    """Turn measurements into a row."""
    row.compute_s, row.step_s = base.seconds, passes.seconds
    row.activations = base.peak_bytes - row.weights
    row.peak = max(traced_peak, passes.peak_bytes - row.activations)  # the second one covers the first pass too
    row.of_compute, row.of_weights = row.step_s / row.compute_s, row.peak / row.weights
    row.host_syncs, row.copies = passes.host_syncs, passes.copies
    row.of_copied, row.copy_busy = passes.copied_bytes / row.weights, passes.copy_seconds / row.step_s
    row.identical = torch.equal(passes.output, base.output)


def describe(attached: Attached) -> Any:
    """What the plan chose, as plain data."""
    if attached.handle is None:
        return None
    report = attached.handle.report()
    return report.to_dict() if hasattr(report, "to_dict") else str(report)


def methods_for(case: ModelCase, budgets: list[float]) -> list[Method]:
    """The resident run, the peers, and ours at every budget."""
    lifetimes = ("lasting", "use") if case.one_pass else ("",)
    ours = [layerwise(percent / 100, residency) for residency in lifetimes for percent in budgets]
    return [resident(), *peers(), *ours]


def run_model(case: ModelCase, budgets: list[float], quick: bool, trace_dir: Path | None) -> list[Row]:
    """All methods on one model, printed as they come."""
    sim.configure(**case.clock())
    bench = Bench(case, quick, trace_dir)
    rows: list[Row] = []
    for method in methods_for(case, budgets):
        rows.append(bench.run(method))
        if len(rows) == 1:
            print_header(case, rows[0])
        print_row(rows[-1])
    return rows


def print_header(case: ModelCase, row: Row) -> None:
    """The model's line and the columns' names."""
    share = row.activations / row.weights
    print(f"\n{case.title}: compute {row.compute_s * 1e3:.1f} ms per step, transfer/compute {case.ratio}, "
          f"scaled weights {row.weights / 2**20:.1f} MiB, activations {share:.2f} of that")  # fmt: skip
    print(f"{'method':<40}{'step ms':>10}{'/compute':>9}{'peak/W':>8}{'/bound':>8}{'target':>8}{'/order':>8}"
          f"{'copies':>8}{'syncs':>7}{'copied/W':>9}{'copying':>8}  ring, groups")  # fmt: skip


def print_row(row: Row) -> None:
    """One line of the table."""
    if row.error:
        print(f"{row.method:<40}  {row.error}")
        return
    target = f"{row.target:.2f}{'!' if row.of_bound > row.target else ' '}" if row.target else "- "
    print(f"{row.method:<40}{row.step_s * 1e3:>10.2f}{row.of_compute:>9.3f}{row.of_weights:>8.3f}{row.of_bound:>8.3f}"
          f"{target:>8}{row.of_order_bound:>8.3f}{row.copies:>8.0f}{row.host_syncs:>7.0f}{row.of_copied:>9.3f}"
          f"{row.copy_busy:>8.2f}"
          f"  {short(row)}{'' if row.identical else '  OUTPUT DIFFERS'}", flush=True)  # fmt: skip


def short(row: Row) -> str:
    """What the plan chose, on one line: the ring, and how many of the groups are resident."""
    if not row.plan:
        return ""
    parts = row.plan["components"]
    kept, groups = (sum(part[key] for part in parts) for key in ("resident_groups", "groups"))
    slots, share = row.plan["ring_slots"], row.plan["ring_slot_bytes"] / row.weights
    return f"{slots} x {100 * share:.2f} %, {kept} of {groups} resident"


def print_misses(rows: list[Row]) -> None:
    """Every promise that isn't kept."""
    missed = [row for row in rows if row.missed]
    print(f"\n{len(missed)} of {sum(row.ours for row in rows)} runs of ours miss a target")
    for row in missed:
        what = row.error or f"step/bound {row.of_bound:.3f} (target {row.target}), peak/weights {row.of_weights:.3f}"
        print(f"  {row.model}, {row.method}: {what}{'' if row.identical or row.error else ', output differs'}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES), help="comma-separated, of: " + ", ".join(CASES))
    parser.add_argument("--budgets", default=",".join(f"{b:g}" for b in BUDGETS), help="percent of the weights")
    parser.add_argument("--quick", action="store_true", help="time one pass instead of two")
    parser.add_argument("--json", type=Path, help="write all rows, versions and clock constants here")
    parser.add_argument("--plot", type=Path, help="draw step time against memory here, as PNG and SVG")
    parser.add_argument("--trace", type=Path, help="write one timeline per run into this folder (Perfetto reads them)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(arguments)
    options.models = [name.strip() for name in options.models.split(",")]
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; the models are {', '.join(CASES)}")
    options.budgets = [float(percent) for percent in options.budgets.split(",")]
    return options


def main() -> int:
    """Run, print, write."""
    options = parse()
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # diffusers' group offload warns of modules that are never called
    began, rows = time.time(), []
    for name in options.models:
        rows += run_model(CASES[name], options.budgets, options.quick, options.trace)
    print_misses(rows)
    print(f"{time.time() - began:.0f} s of real time")
    if options.json:
        data = {"versions": versions(), "clock": {name: CASES[name].clock() for name in options.models},
                "rows": [dataclasses.asdict(row) for row in rows]}  # fmt: skip
        options.json.write_text(json.dumps(data, indent=1, default=str) + "\n")
    if options.plot:
        from plot import draw

        draw([dataclasses.asdict(row) for row in rows], {name: CASES[name].title for name in CASES}, options.plot)
    return 1 if options.check and any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
