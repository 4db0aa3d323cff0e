"""Plans follow what calls need: between two calls the plan is made anew with what is free, and what was measured.

Within a call a plan only ever gets smaller. Nothing here waits for the device: the allocator's counters are the host's.
"""

from __future__ import annotations

import dataclasses
import logging as levels
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from . import auto, platform
from .activations import SLACK, Activations, Signature, bounds
from .auto import Decision, Needs
from .clock import PassClock
from .config import Mode, Residency
from .log import get_logger
from .plan import ComponentSpec, OffloadPlan
from .schedule import Schedule
from .search import Request, steady_step
from .selection import role
from .shortage import Planning, Shortage
from .terms import Terms
from .transfer import Transfer

logger = get_logger(__name__)
#: Without a budget, this share of the free memory is left alone (other processes, fragmentation). When what is free has
#: changed by more than that share, a new plan is due.
MARGIN = 0.05
#: A new plan must be this much faster by prediction before groups are cut anew.
WORTHWHILE = 0.995


class Owner(Protocol):
    """What a runtime is to this module."""

    transfer: Transfer
    schedules: list[Schedule]
    plan: OffloadPlan
    shortage: Shortage
    host_limit: Callable[[], int | None]


def shapes(value: Any) -> Signature:
    """The shapes of all tensors in a nest of containers, in order."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape),)
    if isinstance(value, dict):
        return tuple(shape for item in value.values() for shape in shapes(item))
    if isinstance(value, (list, tuple)):
        return tuple(shape for item in value for shape in shapes(item))
    return ()


def free_memory(devices: Sequence[torch.device]) -> int | None:
    """The least free memory of several devices; None where none of them says."""
    found = [free for device in devices if (free := platform.free_memory(device)) is not None]
    return min(found, default=None)


def has_changed(before: int | None, now: int | None) -> bool:
    """Whether free memory has changed by more than the margin.

    Example:
        >>> has_changed(1000, 960), has_changed(1000, 900), has_changed(1000, 1100)
        (False, True, True)
    """
    if before is None or now is None:
        return before is not now
    return abs(now - before) > MARGIN * before


@dataclasses.dataclass
class _Open:
    """A pass that is measured: whose, and the bytes of weights held at its beginning."""

    schedule: Schedule
    held: int


class Fitting:
    """Keeps one runtime's plan fitted to its calls.

    Args:
        owner (`Owner`): The runtime.
        terms (`Terms`): What the user asked for.
        planning (`Planning`): How it plans.

    Attributes:
        clock (`PassClock`): Times passes against the plan.
    """

    def __init__(self, owner: Owner, terms: Terms, planning: Planning) -> None:
        self.owner = owner
        self.terms = terms
        self.planning = planning
        self.clock = PassClock(owner.transfer)
        self.activations = Activations()
        self._policy = terms.policy
        self._free: int | None = None
        self._needs: Needs | None = None
        self._expected: Signature = ()
        self._signature: Signature | None = None
        self._has_turned = False
        self._is_in_call = False
        self._is_whole = True
        self._calls = 0
        self._measures = False
        self._foreign, self._peak = 0, 0
        self._open: _Open | None = None
        self._made: OffloadPlan | None = None
        self._inputs: tuple[int | None, Needs | None] = (terms.budget, None)
        self._logged: tuple[object, ...] | None = None

    # ------------------------------------------------------------------ the plan
    @property
    def _follows(self) -> bool:
        """Whether plans depend on what is measured at all."""
        return self.terms.has_calls and self.terms.mode in (Mode.AUTO, Mode.SPEED) and self.owner.transfer.is_async

    @property
    def total(self) -> int | None:
        """Device bytes that may be used; None while no limit is known."""
        if self.terms.budget is not None:
            return self.terms.budget
        return None if self._free is None else int(self._free * (1 - MARGIN))

    def start(self) -> None:
        """First work in this process: what the platform declares, and the free memory where no budget was given."""
        if self._policy is not None:
            default = platform.streaming_default(self.owner.transfer.device)
            self._policy = dataclasses.replace(self._policy, default=default)
        self._read_free()
        self._inputs = (self.total, self._needs)

    def _read_free(self) -> None:
        """Takes over how much is free, what is held by weights of ours included, when that has changed."""
        if self.terms.budget is not None:
            return
        transfer = self.owner.transfer
        free = free_memory([transfer.device]) if transfer.is_async else self.owner.host_limit()
        free = None if free is None else free + self.owner.transfer.held_bytes
        if has_changed(self._free, free):
            self._free = free
            if self._policy is not None:
                self._policy = dataclasses.replace(self._policy, free=free)

    def plan(self, specs: Sequence[ComponentSpec], request: Request) -> OffloadPlan:
        """The plan for a request: as the mode and the profile have it, with room for what activations need.

        A strict request is a user's: it is refused by what is reserved by default, not by what was measured.
        """

        def make(request: Request) -> OffloadPlan:
            return auto.carry_out(auto.decide(specs, request, self._policy), specs, request)

        if request.strict or self._needs is None or request.total is None or self.owner.shortage.limit is not None:
            found = make(request)
        else:
            found = auto.with_room(specs, request, self._needs, make)
        if not request.strict:
            self._made = found
        return found

    def decision(self) -> Decision:
        """What the mode means at the moment."""
        request = dataclasses.replace(self.planning.request(False), reserve=self.owner.plan.reserve)
        return auto.decide([schedule.spec() for schedule in self.owner.schedules], request, self._policy)

    def need_of(self, name: str) -> int | None:
        """Bytes that a component's activations took, in calls like the last one, as far as the counters tell."""
        found = self.activations.of(self._expected).get(name)
        return None if found is None else found.value(self._assumed())

    def forget(self, schedule: Schedule) -> None:
        """A component is gone, or has changed its structure."""
        self.activations.forget(schedule.name)

    # ------------------------------------------------------------------ calls
    def start_call(self) -> None:
        """A call begins, and nothing is in use: adopts the plan that fits what is free, and calls like the last one."""
        self._is_in_call, self._is_whole, self._signature, self._open = True, True, None, None
        self.activations.start_call()
        self._measures = False
        if not self._follows:
            return
        found = platform.memory_counters(self.owner.transfer.device)
        if found is not None:
            self._foreign, self._peak = max(0, found[0] - self.owner.transfer.held_bytes), found[1]
            self._measures = self._should_measure(self._expected)
        self._read_free()
        self._refit()

    def _should_measure(self, signature: Signature) -> bool:
        return self.terms.reserve is None and not self.activations.is_measured(signature)

    def _assumed(self) -> int:
        """What is reserved for activations by default."""
        return dataclasses.replace(self.planning.request(True), total=self.total, reserve=None).reserved

    def _refit(self) -> None:
        needs = self.activations.needs(self._expected, self._assumed())
        plan = self.owner.plan
        total, before = self._inputs
        is_ours = self._made is None or (plan.budget, plan.reserve) == (self._made.budget, self._made.reserve)
        serves = before is not None and needs is not None and before.serves(needs, SLACK + 1, total or 0)
        if total == self.total and (serves or needs == before) and is_ours:
            return
        self._inputs, self._needs = (self.total, needs), needs
        made = self.planning.make()
        if self._keeps(plan, made):
            self._made = self.owner.plan = dataclasses.replace(plan, budget=made.budget, reserve=made.reserve)
            return
        cuts = {component.name: component.groups for component in plan.components}
        changed = [s for s in self.owner.schedules if cuts.get(s.name) != made.component(s.name).groups]
        self.planning.adopt(made, changed)
        self._log()

    def _keeps(self, plan: OffloadPlan, made: OffloadPlan) -> bool:
        """Whether the plan in force still fits, means the same, and is as fast as the new one: then nothing moves."""
        needs = self._needs or Needs({}, plan.reserve)
        if made.budget is not None and auto.total_peak(plan, needs)[0] > made.budget + made.reserve:
            return False
        if plan.mode is not made.mode or _choices(plan) != _choices(made):
            return False
        return self._seconds(made) >= WORTHWHILE * self._seconds(plan)

    def _seconds(self, plan: OffloadPlan) -> float:
        """Seconds of all passes so far, if they had been under a plan, and of loading residents for each call."""
        link = self.planning.request(False).link
        spent = 0.0
        for schedule in self.owner.schedules:
            part = plan.component(schedule.name)
            if schedule.order.used:
                spent += schedule.counters.passes * steady_step(schedule.spec(), plan, link)
                if part.residency is Residency.USE:
                    spent += self._calls * part.resident_bytes / link.bandwidth
        return spent

    def end_call(self) -> None:
        """A call ends; everything of it is still where it was."""
        if self._open is not None:
            # A VAE's decode has no end of its own.
            self._measure(self._open)
        self._open = None
        if not self._is_in_call:
            return
        self._is_in_call = False
        self._calls += 1
        if self._is_whole:
            self._expected = self._signature or ()
            if self._measures:
                self.activations.end_call(self._expected)
            self._log()

    def recover(self) -> None:
        """The call was cut short: what was measured in it isn't all that it needs."""
        self._open, self._is_whole = None, False
        self.clock.stop()

    # ------------------------------------------------------------------ passes
    def see(self, schedule: Schedule, inputs: Any) -> None:
        """A component's root gets its inputs: the first denoiser's tell the shape of the call."""
        if self._signature is not None or not (self._is_in_call and self._follows):
            return
        if role(schedule.name.partition(" of ")[0]) == "dit" and (found := shapes(inputs)):
            self._signature = found
            self._has_turned = found != self._expected

    def settle(self) -> None:
        """Before a pass, nothing in use: sheds residents when a call of this shape is known to need more than is left.

        What it needs less is given to residents by the next call of the same shape.
        """
        if not self._has_turned or self._signature is None:
            return
        self._has_turned = False
        self._measures = self._measures or self._should_measure(self._signature)
        needs = self.activations.needs(self._signature, self._assumed())
        plan, total = self.owner.plan, self.total
        if needs is None or total is None or auto.total_peak(plan, needs)[0] <= total:
            return
        self._inputs, self._needs = (total, needs), needs
        made = self.planning.make()
        if made.peak_bytes < plan.peak_bytes:
            for schedule in self.owner.schedules:
                # First: what the larger plan holds isn't the smaller one's peak.
                schedule.drop_all()
            self.planning.adopt(made, self.owner.schedules)
            self._log()

    def begin_pass(self, schedule: Schedule) -> None:
        """A pass has begun, and its first loads are queued."""
        if not (self.terms.has_calls or self.owner.plan.provisional):
            self._log()  # a bare module, whose calls nobody sees
        self.clock.begin(schedule, self.owner.plan.component(schedule.name))
        if self._measures and self._is_in_call:
            self._open = _Open(schedule, self.owner.transfer.held_bytes)

    def end_pass(self, schedule: Schedule) -> None:
        """A pass is about to end. One that skips layers is no measure of what passes need."""
        found, self._open = self._open, None
        if schedule.skips_layers():
            self.clock.stop()
            return
        self.clock.end(schedule)
        if found is not None and found.schedule is schedule:
            self._measure(found)

    def _measure(self, pass_: _Open) -> None:
        found = platform.memory_counters(self.owner.transfer.device)
        if found is None or not self._is_whole:
            return
        peak, before = found[1], self._peak
        self._peak = peak
        if peak < before:
            return  # somebody has reset the statistics meanwhile
        held = sorted([pass_.held, self.owner.transfer.held_bytes])
        self.activations.add(pass_.schedule.name, bounds(peak, peak > before, (held[0], held[1]), self._foreign))

    # ------------------------------------------------------------------ in words
    def _log(self) -> None:
        """Says what was decided, once for each plan."""
        plan = self.owner.plan
        if not logger.isEnabledFor(levels.INFO) or self._logged == _cuts(plan):
            return
        self._logged = _cuts(plan)
        for line in auto.describe(plan, self._needs):
            logger.info(line)


def _choices(plan: OffloadPlan) -> list[tuple[str, object]]:
    """What becomes of each component."""
    return [(component.name, component.choice) for component in plan.components]


def _cuts(plan: OffloadPlan) -> tuple[object, ...]:
    """What a component's schedule sees of a plan."""
    return (plan.slot_bytes, plan.slots, *((c.name, c.choice, c.residency, c.groups) for c in plan.components))
