"""Host memory of a planned call: what is held, what is read from files, and how long the disk takes for it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .config import HostTier, Residency, format_bytes
from .cost import Problem
from .hostmemory import HostItem, HostPlan, assign_tiers
from .plan import ComponentPlan, OffloadPlan
from .staging import most_bytes

#: What reading takes of the budget for itself.
STAGING_BYTES = most_bytes(is_async=True)


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """What a call reads from checkpoint files.

    Attributes:
        nbytes (`int`): Bytes of a call.
        step_seconds (`float`): Seconds that reading alone takes of a step.
        host_peak (`int`, *optional*): Bytes of host memory that weights and staging take; None without a host budget.
    """

    nbytes: int = 0
    step_seconds: float = 0.0
    host_peak: int | None = None

    def __str__(self) -> str:
        if self.host_peak is None:
            return ""
        text = f"host memory {format_bytes(self.host_peak)}"
        return text + f"; {format_bytes(self.nbytes)} a call from files, {self.step_seconds:.3f} s a step"


def within_host(problem: Problem, plan: OffloadPlan, budget: int | None) -> tuple[Problem, HostPlan | None]:
    """The same problem with weights left in their files where they don't fit a host budget.

    Args:
        problem (`Problem`): All weights are taken to be in safetensors files with the dtype they are used in.
        plan (`OffloadPlan`): Who is resident so far: those weights are loaded once, and so may come from files first.
        budget (`int`, *optional*): Bytes of host memory; None: no limit, everything is held.

    Example:
        >>> problem, host = within_host(problem, solve(problem, 12 << 30), 16 << 30)
    """
    if budget is None:
        return problem, None
    items = [item for spec in problem.specs for item in _items(problem, plan.component(spec.name))]
    weights = max(0, budget - STAGING_BYTES) if sum(item.nbytes for item in items) > budget else budget
    host = assign_tiers(items, weights, HostTier.PINNED, HostTier.FILE)
    specs = []
    for spec in problem.specs:
        read = [host.tiers[spec.name, index] is HostTier.FILE for index in range(len(spec.units))]
        units = tuple(dataclasses.replace(unit, is_read=own) for unit, own in zip(spec.units, read, strict=True))
        specs.append(dataclasses.replace(spec, units=units))
    return dataclasses.replace(problem, specs=tuple(specs)), host


def _items(problem: Problem, part: ComponentPlan) -> Iterator[HostItem]:
    passes = max(1, problem.trace.component(part.name).calls)
    for group in part.groups:
        for index in range(group.start, group.stop):
            yield HostItem(part.name, index, part.units[index].size, 1 if group.resident else passes, from_file=True)


def disk_use(problem: Problem, plan: OffloadPlan) -> DiskUse:
    """What a call reads under a plan."""
    if plan.host is None:
        return DiskUse()
    nbytes = sum(component_reads(problem, part) for part in plan.components)
    seconds = sum(plan.component(name).read_seconds for name, _ in problem.trace.step_passes())
    reads = any(unit.is_read for part in plan.components for unit in part.units)
    return DiskUse(nbytes, seconds, plan.host.held + (STAGING_BYTES if reads else 0))


def component_reads(problem: Problem, part: ComponentPlan) -> int:
    """Bytes that a component reads from files in a call: what streams in each pass, what is resident once."""
    once = sum(
        unit.size
        for group in part.groups
        if group.resident and part.residency is Residency.USE
        for unit in part.units[group.start : group.stop]
        if unit.is_read
    )
    calls = problem.trace.component(part.name).calls
    return (part.read_bytes * calls + once) if calls else 0
