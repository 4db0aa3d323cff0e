"""What a pipeline will take, in bytes and seconds, before a device or weights are at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from . import auto
from .config import Mode, format_bytes, parse_bytes
from .cost import (
    FREE,
    Problem,
    all_seconds,
    free_budget,
    resident_budget,
    smallest_budget,
    solve,
    step_seconds,
    total_peak,
)
from .hardware import Hardware
from .hostplans import component_reads, disk_use, within_host
from .plan import OffloadPlan

#: Raised when a key of `to_dict()` changes its meaning or goes away.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class ComponentPrediction:
    """One component under a plan. Bytes, FLOPs of all its passes in a call, and seconds.

    `pass_seconds` is a pass in steady state, `compute_seconds` the same without any wait, `call_seconds` all passes of
    a call; None where no pass was traced. `error` says why. `disk_bytes` are read from files in a call.
    """

    name: str
    choice: str
    weights: int
    resident_bytes: int
    streamed_bytes: int
    fixed_bytes: int
    activation_peak: int
    flops: int
    calls: int
    pass_seconds: float | None
    compute_seconds: float | None
    call_seconds: float | None
    error: str | None
    disk_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class PlanPoint:
    """A budget and what it gives. `step_seconds` is None where no step was traced."""

    budget: int
    step_seconds: float | None
    total_seconds: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class PredictedPlan(OffloadPlan):
    """A plan with what it will take. Bytes and seconds.

    Args:
        hardware (`Hardware`, *optional*): The device that times are for.
        predictions (`tuple[ComponentPrediction]`): By component.
        total_peak_bytes (`int`), `peak_at` (`str`): The most device memory, weights and activations, and where.
        step_seconds, compute_seconds (`float`, *optional*): One step of the pipeline, and its compute alone.
        total_seconds (`float`): One call (not the first one, in which the order of execution is learned).
        steps (`int`): Steps of the scheduler in that call.
        smallest_budget, resident_budget (`int`): From where on it runs, and from where on nothing streams.
        free_budget (`int`, *optional*): From about where on streaming costs nothing (a step takes at most 1 % longer).
        host_peak_bytes (`int`, *optional*): Host memory of weights and staging; None without a host budget.
        disk_bytes (`int`), disk_step_seconds (`float`): Read from checkpoint files in a call, and how long that alone
            takes in a step.
        tiled (`tuple[str]`): VAEs that this is with tiling of: call `enable_tiling()` of them first.
        notes (`tuple[str]`): What was assumed, and what could not be traced.

    Example:
        >>> plan = plan_layerwise_offload("flux-folder", memory_budget="12GiB", hardware="RTX 4090", height=1024)
        >>> print(plan)
        >>> pipe.enable_layerwise_offload(memory_budget="12GiB", config={"activation_reserve": plan.reserve})
    """

    hardware: Hardware | None = None
    predictions: tuple[ComponentPrediction, ...] = ()
    total_peak_bytes: int = 0
    peak_at: str = ""
    step_seconds: float | None = None
    compute_seconds: float | None = None
    total_seconds: float = 0.0
    steps: int = 0
    smallest_budget: int = 0
    resident_budget: int = 0
    free_budget: int | None = None
    host_peak_bytes: int | None = None
    disk_bytes: int = 0
    disk_step_seconds: float = 0.0
    tiled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: Problem | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def bound(self) -> str:
        """What a step waits for: `"link"`, `"disk"` or `"compute"`."""
        if self.step_seconds is None or self.compute_seconds is None:
            return "unknown"
        if self.step_seconds <= FREE * self.compute_seconds:
            return "compute"
        return "disk" if self.disk_step_seconds > self.step_seconds / 2 else "link"

    def sweep(self, budgets: Iterable[int | str] | int | str) -> list[PlanPoint]:
        """The same call under other budgets; those below the smallest are left out.

        Args:
            budgets (`Iterable[int | str]`): Bytes, or texts such as `"8GiB"`; one or several.
        """
        if self.problem is None:
            return []
        given = [budgets] if isinstance(budgets, (int, str)) else list(budgets)
        sizes = [parse_bytes(budget, "budgets") for budget in given]
        return [_point(self.problem, size) for size in sizes if size >= self.smallest_budget]

    def budgets(self, count: int = 9) -> list[int]:
        """Budgets from the smallest to that at which all is resident, evenly spaced."""
        low, high = self.smallest_budget, max(self.resident_budget, self.smallest_budget)
        return sorted({low + (high - low) * i // max(1, count - 1) for i in range(count)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `version` changes when a key does."""
        fields = [f.name for f in dataclasses.fields(PredictedPlan) if f.name not in ("problem", "components")]
        values = {name: getattr(self, name) for name in fields}
        values |= {
            "version": VERSION,
            "mode": self.mode.value,
            "bound": self.bound,
            "together": [sorted(names) for names in self.together],
            "weights_peak_bytes": self.peak_bytes,
            "hardware": None if self.hardware is None else self.hardware.to_dict(),
            "predictions": [dataclasses.asdict(p) for p in self.predictions],
            "host": None if self.host is None else {"budget": self.host.budget, "nbytes": self.host.nbytes},
            "notes": list(self.notes),
        }
        return values

    def __str__(self) -> str:
        budget = "" if self.budget is None else f" of {format_bytes(self.budget + self.reserve)}"
        stopped = self.problem is not None and self.problem.trace.error is not None
        early = "the call was not traced to its end; " if stopped else ""
        device = self.hardware.name if self.hardware else "an unknown device"
        lines = [
            f"{early}plan: mode {self.mode.value} on {device}, peak "
            f"{format_bytes(self.total_peak_bytes)}{budget} (at {self.peak_at})"
            + (f", ring of {self.slots} slots of {format_bytes(self.slot_bytes)}" if self.slots else ""),
            *_table(self.predictions),
            _times(self),
            f"runs from {format_bytes(self.smallest_budget)}{_thresholds(self)}",
        ]
        if self.host is not None and self.problem is not None:
            lines += [str(disk_use(self.problem, self)), *str(self.host).splitlines()[1:]]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _thresholds(plan: PredictedPlan) -> str:
    if plan.mode is Mode.MEMORY:
        return ", and takes no more of a larger budget (mode memory)"
    free = f"; streaming is free from about {format_bytes(plan.free_budget)}" if plan.free_budget else ""
    return f"{free}; all resident from {format_bytes(plan.resident_budget)}"


def _times(plan: PredictedPlan) -> str:
    total = (
        f"a call of {plan.steps} steps {plan.total_seconds:.2f} s"
        if plan.steps
        else (f"a call {plan.total_seconds:.2f} s")
    )
    if plan.step_seconds is None or plan.compute_seconds is None:
        return total
    return (
        f"a step {plan.step_seconds:.3f} s (compute alone {plan.compute_seconds:.3f} s, bound by {plan.bound}); {total}"
    )


def _table(predictions: Iterable[ComponentPrediction]) -> list[str]:
    head = ("component", "", "weights", "resident", "streamed", "activations", "passes", "TFLOP", "a pass", "a call")
    rows: list[tuple[str, ...]] = [head]
    for p in predictions:
        sizes = (p.weights, p.resident_bytes + p.fixed_bytes, p.streamed_bytes)
        seconds = ["-" if s is None else f"{s:.3f} s" for s in (p.pass_seconds, p.call_seconds)]
        activations = format_bytes(p.activation_peak) if p.calls else "-"
        counts = (activations, str(p.calls), f"{p.flops / 1e12:.2f}")
        rows.append((p.name, p.choice, *map(format_bytes, sizes), *counts, *seconds))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def predict(
    problem: Problem, budget: int | None, notes: Iterable[str] = (), host_budget: int | None = None
) -> PredictedPlan:
    """A plan for a budget, with what it will take; `host_budget` are bytes of host memory, None is no limit.

    Raises:
        torch.OutOfMemoryError: The budget is below the smallest that works.
    """
    plan = solve(problem, budget)
    problem, host = within_host(problem, plan, host_budget)
    if host is not None:
        plan = dataclasses.replace(solve(problem, budget), host=host)
    disk = disk_use(problem, plan)
    if budget is not None:
        request = problem.request(budget, plan.reserve)
        notes = [*notes, *auto.decide(problem.specs, request, problem.policy).notes]
    peak, where = total_peak(plan, problem)
    step = step_seconds(problem, plan)
    values = {f.name: getattr(plan, f.name) for f in dataclasses.fields(OffloadPlan)}
    point = _total_seconds(problem, plan)
    return PredictedPlan(
        **values,
        hardware=problem.hardware,
        predictions=_predictions(problem, plan),
        total_peak_bytes=peak,
        peak_at=where,
        step_seconds=None if step is None else step[0],
        compute_seconds=None if step is None else step[1],
        total_seconds=point,
        steps=problem.trace.steps,
        smallest_budget=smallest_budget(problem)[0],
        resident_budget=resident_budget(problem),
        free_budget=free_budget(problem, plan),
        host_peak_bytes=disk.host_peak,
        disk_bytes=disk.nbytes,
        disk_step_seconds=disk.step_seconds,
        notes=(*notes, *_notes(problem, plan, peak, budget)),
        problem=problem,
    )


def _predictions(problem: Problem, plan: OffloadPlan) -> tuple[ComponentPrediction, ...]:
    found = []
    times = all_seconds(problem, plan)
    for part in plan.components:
        traced, seconds = problem.trace.component(part.name), times[part.name]
        found.append(
            ComponentPrediction(
                part.name,
                part.choice.value,
                part.weights,
                part.resident_bytes,
                part.streamed_bytes,
                part.fixed_bytes,
                traced.activation_peak,
                traced.flops,
                traced.calls,
                None if seconds is None else seconds.step,
                None if seconds is None else seconds.compute / max(1, traced.calls),
                None if seconds is None else seconds.call,
                traced.error,
                component_reads(problem, part),
            )
        )
    return tuple(found)


def _total_seconds(problem: Problem, plan: OffloadPlan) -> float:
    times = all_seconds(problem, plan).values()
    return problem.hardware.seconds(problem.trace.outside) + sum(t.call for t in times if t is not None)


def _point(problem: Problem, budget: int) -> PlanPoint:
    if problem.policy is not None:
        problem = dataclasses.replace(problem, policy=dataclasses.replace(problem.policy, has_budget=True))
    plan = solve(problem, budget)
    step = step_seconds(problem, plan)
    total = _total_seconds(problem, plan)
    return PlanPoint(budget, None if step is None else step[0], total, total_peak(plan, problem)[0])


def _notes(problem: Problem, plan: OffloadPlan, peak: int, budget: int | None) -> list[str]:
    trace = problem.trace
    notes = list(trace.notes)
    if trace.error:
        notes.append(f"the call was not traced to its end, so peaks and times are at least these: {trace.error}")
    notes += [f"{c.name}: {c.error}" for c in trace.components if c.error]
    idle = [c.name for c in trace.components if not c.passes and not c.error and c.weights]
    if idle:
        notes.append(f"no pass of {', '.join(idle)} was seen: planned by weights alone")
    if budget is not None and peak > budget:
        notes.append(
            f"the peak is above the budget by {format_bytes(peak - budget)}: raise config['activation_reserve']"
        )
    for name, tiled in trace.tiled.items():
        now = trace.component(name).activation_peak
        notes.append(
            f"{name}: its activations of {format_bytes(now)} are the largest; pipe.{name}.enable_tiling() lowers them "
            f"to {format_bytes(tiled.peak)}"
        )
    if problem.hardware.source:
        notes.append(f"{problem.hardware.name}: {problem.hardware.source}")
    return notes
