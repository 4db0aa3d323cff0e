"""What happened: a report for people (`str`) and for programs (`to_dict`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from .config import format_bytes
from .plan import ComponentPlan, OffloadPlan
from .runtime import Runtime
from .schedule import Schedule
from .tiers import HostMemory, held, main_tier

#: Raised when a key of `to_dict()` changes its meaning or goes away.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class ComponentReport:
    """One component. Sizes in bytes, times in seconds.

    `peak_predicted` and `peak_seen` count what it holds itself and, if it streams, the ring that all share.
    `hits` and `misses` count uses of streamed groups that had been prefetched or had to be loaded on demand;
    `stall` is the time of one measured pass that compute waited for copies, None before it was measured.
    `skipped_loads` and `skipped_bytes` are loads that whole passes make, and which those that skipped layers didn't.
    `gathered_bytes` are embedding tables that stay on the host, `read_bytes` are read from files in each pass, which
    alone is predicted to take `read_predicted`; `step_measured` and `activation_peak` are what `step_predicted` and the
    report's `activation_reserve` turned out as.
    """

    name: str
    choice: str
    weights: int
    groups: int
    resident_groups: int
    streamed_groups: int
    resident_bytes: int
    streamed_bytes: int
    fixed_bytes: int
    peak_predicted: int
    peak_seen: int
    moved_bytes: int
    host_tier: str
    host_bytes: dict[str, int]
    pinned_bytes: int
    disk_bytes: int
    passes: int
    hits: int
    misses: int
    dropped: int
    skipped_loads: int
    skipped_bytes: int
    stall: float | None
    step_predicted: float | None
    step_measured: float | None
    activation_peak: int | None
    gathered_bytes: int
    read_bytes: int
    read_predicted: float
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a handle has done so far.

    `peak_predicted` and `peak_seen` count weight bytes on the execution device (ring, resident groups, fixed weights)
    under the plan in force; `peak_ever` is the highest since the handle was made;
    `moved_bytes` counts host-to-device copies of weights. `activation_reserve` is what the plan leaves to activations,
    `profile` what mode `"auto"` goes by. `host_limit` are the bytes of host memory that were given or found, of which
    staging leaves `host_budget` to weights. `host_bytes` and `host_peak` are the host memory that weights and staging
    take, and took at most; `disk_bytes` counts what was read from checkpoint files for them.

    Example:
        >>> print(pipe.layerwise_offload.report())
    """

    mode: str
    device: str
    budget: int | None
    weights: int
    ring_slots: int
    ring_slot_bytes: int
    peak_predicted: int
    peak_seen: int
    peak_ever: int
    moved_bytes: int
    copies: int
    activation_reserve: int
    profile: str | None
    host_budget: int | None
    host_limit: int | None
    host_bytes: int
    host_peak: int
    disk_bytes: int
    components: tuple[ComponentReport, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values; `version` changes when a key does."""
        return {"version": VERSION} | dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"layerwise offload on {self.device}, mode {self.mode}: {format_bytes(self.weights)} of weights, "
            f"peak on the device {format_bytes(self.peak_ever)} (planned {format_bytes(self.peak_predicted)}"
            + (f", budget {format_bytes(self.budget)})" if self.budget is not None else ")"),
            f"moved {format_bytes(self.moved_bytes)} in {self.copies} copies"
            + _ring(self.ring_slots, self.ring_slot_bytes),
            *_table(self.components),
            *_skipped(self.components),
            *([f"profile: {self.profile}"] if self.profile is not None else []),
            self._host(),
            *(f"note: {note}" for note in self.notes),
        ]
        lines += [f"note: {c.name}: {note}" for c in self.components for note in c.notes]
        return "\n".join(lines)

    def _host(self) -> str:
        text = f"host memory {format_bytes(self.host_bytes)} (peak {format_bytes(self.host_peak)})"
        if self.host_limit is not None:
            text += f" of {format_bytes(self.host_limit)}"
        text += "".join(f"; {_tiers(component)}" for component in self.components)
        if self.disk_bytes:
            each = sum(component.read_predicted for component in self.components)
            text += f"; {format_bytes(self.disk_bytes)} read from files"
            text += f" ({each:.3f} s for a pass of each)" if each else ""
        return text


def _tiers(component: ComponentReport) -> str:
    held = " and ".join(f"{format_bytes(count)} {tier}" for tier, count in component.host_bytes.items())
    return f"{component.name} {held}"


def _skipped(components: tuple[ComponentReport, ...]) -> list[str]:
    each = {c.name: c.skipped_bytes for c in components if c.skipped_bytes}
    if not each:
        return []
    text = f"skipped layers saved {format_bytes(sum(each.values()))} of loads"
    return [text + "".join(f"; {name} {format_bytes(count)}" for name, count in each.items())]


def _ring(slots: int, slot_bytes: int) -> str:
    return f"; ring of {slots} slot{'s' * (slots > 1)} of {format_bytes(slot_bytes)}" if slots else ""


def make_report(runtime: Runtime, notes: list[str], host: HostMemory) -> Report:
    """Reads a runtime's plan and counters."""
    host_bytes = host.count(runtime.schedules)
    plan, transfer = runtime.plan, runtime.transfer
    components = tuple(_component(s, plan, runtime) for s in runtime.schedules)
    return Report(
        plan.mode.value,
        str(transfer.device),
        None if plan.budget is None else plan.budget + plan.reserve,
        sum(c.weights for c in components),
        plan.slots,
        plan.slot_bytes,
        plan.peak_bytes,
        transfer.peak_bytes,
        transfer.peak_ever,
        transfer.moved_bytes,
        transfer.copies,
        plan.reserve,
        None if runtime.terms.policy is None else str(runtime.terms.policy.profile),
        None if host.plan is None else host.plan.budget,
        None if host.plan is None else host.plan.limit,
        host_bytes,
        host.peak,
        sum(c.disk_bytes for c in components),
        components,
        (*notes, *runtime.fitting.decision().notes),
    )


def _component(schedule: Schedule, plan: OffloadPlan, runtime: Runtime) -> ComponentReport:
    part: ComponentPlan = plan.component(schedule.name)
    counters, account = schedule.counters, schedule.account
    resident = sum(group.resident for group in part.groups)
    return ComponentReport(
        name=schedule.name,
        choice=part.choice.value,
        weights=part.weights,
        groups=len(part.groups),
        resident_groups=resident,
        streamed_groups=len(part.groups) - resident,
        resident_bytes=part.resident_bytes,
        streamed_bytes=part.streamed_bytes,
        fixed_bytes=part.fixed_bytes,
        peak_predicted=part.fixed_bytes + part.resident_bytes + (plan.ring_bytes if part.largest_streamed else 0),
        peak_seen=account.peak + (plan.ring_bytes if account.in_ring else 0),
        moved_bytes=account.moved,
        host_tier=main_tier(schedule),
        host_bytes=held(schedule),
        pinned_bytes=schedule.store.pinned_bytes,
        disk_bytes=schedule.store.disk_bytes,
        passes=counters.passes,
        hits=counters.hits,
        misses=counters.misses,
        dropped=counters.dropped,
        skipped_loads=counters.skipped,
        skipped_bytes=counters.skipped_bytes,
        stall=runtime.tuner.stalled(schedule),
        step_predicted=part.step,
        step_measured=runtime.fitting.clock.seconds(schedule.name),
        activation_peak=runtime.fitting.need_of(schedule.name),
        gathered_bytes=part.gathered_bytes,
        read_bytes=part.read_bytes,
        read_predicted=part.read_seconds,
        notes=tuple(schedule.store.notes),
    )


def _table(components: tuple[ComponentReport, ...]) -> list[str]:
    head = ("component", "", "weights", "groups", "resident", "streamed", "passes", "hits", "misses", "stall")
    rows = [head]
    for c in components:
        stall = "-" if c.stall is None else f"{c.stall * 1e3:.1f} ms"
        held = f"{c.resident_groups} ({format_bytes(c.resident_bytes)})"
        streamed = f"{c.streamed_groups} ({format_bytes(c.streamed_bytes)})"
        counts = (str(c.passes), str(c.hits), str(c.misses))
        rows.append((c.name, c.choice, format_bytes(c.weights), str(c.groups), held, streamed, *counts, stall))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
