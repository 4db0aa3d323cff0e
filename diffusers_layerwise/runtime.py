"""One handle's components on one device: the ring they share, the plan, whose pass it is, and what comes next."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import compiled, locks
from .adapters import unfuse_switched_off
from .config import Mode, Residency
from .errors import LayerwiseOffloadError
from .fitting import WORTHWHILE, Fitting
from .passes import PassLog
from .plan import OffloadPlan
from .readahead import ReadAhead
from .schedule import Schedule
from .search import Request, steady_step
from .sharing import Sharing
from .shortage import Planning, Shortage
from .tensors import ALIGNMENT
from .terms import Terms
from .transfer import Ring, Transfer
from .tuning import Tuner


class Runtime:
    """Runs the schedules of one handle.

    Args:
        transfer (`Transfer`): The device.
        schedules (`Sequence[Schedule]`): The components.
        terms (`Terms`): What the user asked for.

    Raises:
        torch.OutOfMemoryError: A budget was given and no plan fits it.
    """

    def __init__(self, transfer: Transfer, schedules: Sequence[Schedule], terms: Terms) -> None:
        self.transfer = transfer
        self.schedules = list(schedules)
        self.terms = terms
        self.ring: Ring | None = None
        self.notes: list[str] = []
        self.lock = threading.RLock()
        self.is_closed = False
        self.owner: object = None
        self.restructure: Callable[[Schedule], None] = lambda _: None
        self.host_limit: Callable[[], int | None] = lambda: None
        self._is_torn = False
        self._ahead = ReadAhead()
        self.sharing = Sharing(self)
        self._active: Schedule | None = None
        self.tuner = Tuner(transfer)
        self._passes = PassLog()
        self._depth = 0
        self._stream: Any = None
        self.turn = locks.watch(self)
        planning = Planning(self._request, self._make_plan, self._adopt)
        self.shortage = Shortage(self, planning)
        self.fitting = Fitting(self, terms, planning)
        transfer.relieve = self.shortage.relieve
        self.plan = self.plan_for(self.schedules)
        for schedule in self.schedules:
            self._connect(schedule)
        self._adopt(self.plan, self.schedules)

    def _connect(self, schedule: Schedule) -> None:
        schedule.make_slots = self._make_slots
        schedule.next_up = self._next_up
        schedule.open_pass = self.begin_pass
        schedule.may_keep = self._may_keep

    # ------------------------------------------------------------------ plan
    def _request(self, strict: bool) -> Request:
        return Request(
            self.terms.mode,
            self.fitting.total,
            self.terms.reserve if self.terms.has_calls else self.terms.reserve or 0,
            self.terms.residency,
            self.tuner.link_for(self.schedules),
            self.sharing.sorted(),
            provisional=self.is_provisional(),
            strict=strict,
            device=str(self.transfer.device),
        )

    def is_provisional(self) -> bool:
        """Whether a component's order, or the free memory, is still to be seen."""
        learned = all(schedule.order.used for schedule in self.schedules if schedule.component.units)
        return not learned or (self.terms.budget is None and self.transfer.pid is None)

    def _make_plan(self) -> OffloadPlan:
        return self._plan(self.schedules, strict=False)

    def _plan(self, schedules: Sequence[Schedule], strict: bool) -> OffloadPlan:
        specs = [schedule.spec() for schedule in schedules]
        return self.fitting.plan(specs, self.shortage.limited(self._request(strict), specs))

    def plan_for(self, schedules: Sequence[Schedule]) -> OffloadPlan:
        """The plan for these components instead of the present ones; changes nothing.

        Raises:
            torch.OutOfMemoryError: A budget was given and no plan fits it.
        """
        return self._plan(schedules, strict=True)

    def _adopt(self, plan: OffloadPlan, schedules: Sequence[Schedule]) -> None:
        """Puts a plan in force. Components other than `schedules` keep their groups, unless the ring changed."""
        old = self.ring
        shape = (plan.slot_bytes, plan.slots)
        changed = list(schedules)
        whole = self._is_torn or old is None or (old.slot_bytes, old.count) != shape
        self._is_torn = True
        if whole:
            changed = self.schedules
            for schedule in self.schedules:
                schedule.drop_all()
            if old is not None:
                old.close()
            self.ring = Ring(self.transfer, *shape) if plan.slots else None
        self.plan = plan
        self.transfer.start_peak()
        for schedule in changed:
            schedule.account.peak, schedule.account.in_ring = schedule.account.held, False
            schedule.adopt(plan.component(schedule.name), self.ring)
        self._is_torn = False

    def _replan(self, due: Schedule, plan: OffloadPlan | None = None) -> None:
        """Makes the plan anew after `due` showed its order (or takes the one given), and adopts what changed."""
        plan = self._make_plan() if plan is None else plan
        self._adopt(plan, [due, *self._changed(plan, {due})])

    def _changed(self, plan: OffloadPlan, known: set[Schedule]) -> list[Schedule]:
        """The components that another plan than the one in force cuts differently."""
        before = {component.name: component.groups for component in self.plan.components}
        rest = [s for s in self.schedules if s not in known]
        return [s for s in rest if before.get(s.name) != plan.component(s.name).groups]

    def change(self, new: Sequence[Schedule], gone: Sequence[Schedule], plan: OffloadPlan) -> None:
        """Takes components in and lets others go, whose weights are then on the host; the rest keeps what it has.

        Args:
            new (`Sequence[Schedule]`): Components that arrive.
            gone (`Sequence[Schedule]`): Components of this runtime that leave it.
            plan (`OffloadPlan`): What [`plan_for`] made of the components that there will be.
        """
        with self.lock:
            if gone:
                self.recover()
            for schedule in gone:
                schedule.leave()
                self.schedules.remove(schedule)
                self._passes.forget(schedule)
                self.tuner.forget(schedule)
                self.fitting.forget(schedule)
                self.sharing.forget(schedule)
            for schedule in new:
                self._connect(schedule)
            self.schedules.extend(new)
            self._adopt(plan, [*new, *self._changed(plan, set(new))])
            if self._depth:
                for schedule in new:
                    schedule.enter()

    def rebuild(self, schedule: Schedule) -> None:
        """A component's structure has changed: looks it through anew, and plans again for it."""
        self.recover()
        schedule.leave()
        try:
            self.restructure(schedule)
            plan = self.plan_for(self.schedules)
        except BaseException:
            # It may be refused, or too large for the budget: the next pass looks again at what is there then.
            schedule.is_stale = self._is_torn = True
            raise
        self.tuner.forget(schedule)
        self.fitting.forget(schedule)
        self._adopt(plan, [schedule, *self._changed(plan, {schedule})])
        if self._depth:
            schedule.enter()

    # ------------------------------------------------------------------ calls
    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A pipeline call: fixed weights come to the device at its start, and all uses end with it.

        A call inside another one (a pipeline that calls its parent class's `__call__`) belongs to the outer one.
        """
        with self.lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._start_call()
                yield
            except BaseException as error:
                held = self.shortage.held()
                self.recover()
                self.shortage.explain(error, held)
                raise
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._end_call()

    def _start_call(self) -> None:
        self._start()
        self._passes.start_call()
        self.sharing.start_call()
        self.fitting.start_call()
        for schedule in self.schedules:
            component = schedule.component
            if schedule.is_stale or compiled.is_changed(component.module, component.regions):
                self.rebuild(schedule)
            schedule.start_call()
            schedule.enter()

    def _end_call(self) -> None:
        if self.is_closed or self.transfer.is_elsewhere:
            return
        self._follow_stream()
        self.fitting.end_call()
        self._active = None
        for schedule in self.schedules:
            if self.plan.component(schedule.name).residency is Residency.USE:
                schedule.leave()
            else:
                schedule.end_pass()
                schedule.drop_prefetched()
            self.tuner.end(schedule)  # what has no end of its own, as a VAE's `decode`, ends with its call
        if self.ring is not None and not any(c.residency is Residency.LASTING for c in self.plan.components):
            self.ring.close()

    def recover(self) -> None:
        """After an exception or an interrupt: nothing is loading or in use, and no order was learned. Idempotent."""
        if self.is_closed or self.transfer.is_elsewhere:
            return
        self._follow_stream()
        self.fitting.recover()
        self._active = None
        for schedule in self.schedules:
            schedule.recover()
        if self.ring is not None:
            self.ring.recover()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A time in which somebody else may read weights: no call runs, and what was queued for them comes first."""
        with self.lock:
            self._follow_stream()
            yield

    def forget_calls(self) -> None:
        """In a forked child: the thread that was in the middle of a call stayed in the parent."""
        self._depth = 0

    def release(self) -> None:
        """Gives all device memory back until the next pass, and unlocks host memory. Idempotent."""
        with self.lock:
            if self.is_closed or self.transfer.is_elsewhere:
                return
            self._follow_stream()
            self._ahead.stop()
            self._active = None
            for schedule in self.schedules:
                schedule.leave()
                schedule.store.rest()
            if self.ring is not None:
                self.ring.close()

    def close(self) -> None:
        """The hooks were removed: from here on this does nothing any more."""
        self.is_closed = True
        self._ahead.stop()
        for schedule in self.schedules:
            schedule.close()

    def _start(self) -> None:
        """First work in this process: the copy stream, and the free memory where no budget was given."""
        if self.transfer.pid == os.getpid():
            return
        if self.transfer.is_elsewhere:
            raise LayerwiseOffloadError(
                f"This process was forked after {self.transfer.device} had been used by layerwise offload, and a "
                f"device can't be used in a forked child. Start workers with the 'spawn' method, or fork before the "
                f"first call."
            )
        if self.transfer.pid is not None:
            self.recover()  # a forked child: another thread may have been in the middle of a call
        self.transfer.start()
        self.fitting.start()
        if self.terms.budget is None:
            self._adopt(self.plan_for(self.schedules), self.schedules)

    # ------------------------------------------------------------------ passes
    def begin_pass(self, schedule: Schedule) -> None:
        """A component's root is entered: closes whatever ran before, replans if something was learned, and goes."""
        self._start()
        # First: what is closed below marks slots as free on the caller's stream, which must be behind the one before.
        self._follow_stream()
        unfuse_switched_off(schedule)
        if self._is_torn:
            self._adopt(self._make_plan(), self.schedules)
        if schedule.is_stale:
            self.rebuild(schedule)
        if self._active is not None:
            self.end_pass(self._active)
        self.end_pass(schedule)
        self.shortage.settle()
        self.fitting.settle()
        self._active = schedule
        self._passes.add(schedule)
        self._learn(schedule)
        if self.sharing.make_room(schedule, [s for s in self.schedules if s is not schedule]) and self._depth:
            self._replan(schedule)
        self.shortage.within_less(lambda: self._take_memory(schedule))
        self.tuner.start(schedule)
        schedule.begin_pass()
        self._ahead.start(schedule)
        self.fitting.begin_pass(schedule)

    def _take_memory(self, schedule: Schedule) -> None:
        schedule.enter()
        if self.ring is not None:
            self.ring.open()

    def end_pass(self, schedule: Schedule) -> None:
        """A component's root is left. Idempotent."""
        if schedule.is_open:
            self.fitting.end_pass(schedule)
            schedule.end_pass(ahead=True)
            self.tuner.end(schedule)
            self._hand_over(schedule)

    def _hand_over(self, schedule: Schedule) -> None:
        """After a component's last pass of this call, as far as the previous call tells: the next one gets its room."""
        if not self._depth or self.plan.component(schedule.name).residency is not Residency.USE:
            return
        if not self._passes.is_over(schedule):
            return
        if self._active is schedule:
            self._active = None
        schedule.drop_all()
        successor = self._passes.next_up(schedule)
        if successor is not None and self.ring is not None:
            successor.prefetch(residents=True)

    def _learn(self, schedule: Schedule) -> None:
        """Before a pass: takes in what earlier ones showed of this component, its order and its times."""
        timed = self.tuner.take(schedule)
        if schedule.order.is_due or schedule.store.has_gaps:
            part = self.plan.component(schedule.name)
            # A whole component is packed too where it is loaded again for each use.
            if part.largest_streamed or part.residency is Residency.USE:
                for other in self.schedules:
                    other.drop_all()
                schedule.pack()
                with contextlib.suppress(torch.OutOfMemoryError):  # what isn't measured is assumed
                    self.tuner.measure_link(schedule, self.ring)
                self._replan(schedule)
            schedule.order.is_due = False
        elif timed:
            better = self._better_plan(schedule)
            if better is not None:
                self._replan(schedule, better)

    def _better_plan(self, schedule: Schedule) -> OffloadPlan | None:
        """The plan with a component's new times, where it is enough faster than the one in force."""
        if not self.plan.component(schedule.name).largest_streamed or self.plan.mode not in (Mode.AUTO, Mode.SPEED):
            return None
        spec, link = schedule.spec(), self.tuner.link_for(self.schedules)
        new = self._make_plan()
        return new if steady_step(spec, new, link) < WORTHWHILE * steady_step(spec, self.plan, link) else None

    def _follow_stream(self) -> None:
        """When the caller computes on another stream than last time, that one goes behind everything loaded so far."""
        if self.transfer.pid is None or self.transfer.is_elsewhere:
            return
        stream = self.transfer.stream()
        if self._stream is not None and stream != self._stream:
            event = self.transfer.event()
            if event is not None:
                event.record(self._stream)
            self.transfer.wait(event)
        self._stream = stream

    def _may_keep(self, count: int) -> bool:
        """Whether a group that repeats within a pass may stay on the device: the budget has room for it."""
        if self.plan.mode not in (Mode.AUTO, Mode.SPEED):
            return False
        budget = self.plan.budget
        return budget is None or self.transfer.held_bytes + count + ALIGNMENT <= budget

    def _make_slots(self, schedule: Schedule) -> bool:
        """Frees ring slots for a group that is needed now, by dropping the prefetched one that is needed last."""
        if schedule.drop_furthest():
            return True
        found = [other.drop_prefetched() for other in self.schedules if other is not schedule]
        return any(found)

    # ------------------------------------------------------------------ what comes next
    def _next_up(self, schedule: Schedule) -> Schedule | None:
        """Whose pass is predicted next; a bare module follows itself."""
        if not self.terms.has_calls:
            return schedule
        return self._passes.next_up(schedule)
