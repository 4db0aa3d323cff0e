"""One component: the order in which its units are used, and which group to load next.

A pass begins when the component's root is entered (or at the first unit used outside of one) and ends when it is left,
entered anew, or when another component begins. The order is recorded in every pass, with repeats, and takes effect at
the end of the pass. A wrong guess costs time, never correctness: what isn't there when it is used is loaded then.
"""

from __future__ import annotations

from collections.abc import Callable

from .config import LayerwiseOffloadConfig
from .course import Course
from .cuts import cut, spec_of, take_over
from .demand import onload_now
from .discovery import Component, Unit
from .group import Group, GroupState
from .host import HostStore
from .measure import Counters, PassTimer
from .order import Order
from .plan import Choice, ComponentPlan, ComponentSpec
from .tape import Tape
from .transfer import Account, Ring, Transfer
from .ways import Ways


class Schedule:
    """Streams one component.

    Args:
        component (`Component`): What discovery found.
        store (`HostStore`): Its host copy.
        transfer (`Transfer`): The device.
        choice (`Choice`): What becomes of the component.
        config (`LayerwiseOffloadConfig`): Its options.
        unselected (`bool`): The user didn't name it.

    Attributes:
        is_settled (`bool`): All of it is on the device and in order: nothing has to be done for a unit.
        is_open (`bool`): Whether a pass is open: one group at most is in use, others are loading.
        has_inputs (`bool`): Whether the open pass got its inputs at the root, which has moved them to the device.
        record (`list[int]`): Unit indices used so far in the open pass, or in the last one.
        plans (`int`): How many it was given so far.
    """

    def __init__(
        self,
        component: Component,
        store: HostStore,
        transfer: Transfer,
        choice: Choice,
        config: LayerwiseOffloadConfig,
        unselected: bool = False,
    ) -> None:
        self.component = component
        self.name = component.name
        self.store = store
        self.transfer = transfer
        self.choice = choice
        self.config = config
        self.unselected = unselected
        self.is_open = False
        self.is_closed = False
        self.is_stale = False
        self.has_inputs = False
        self.is_settled = False
        self.counters = Counters()
        self.account = Account()
        self.timer: PassTimer | None = None
        self.tape: Tape | None = None
        self.plans = 0
        self.order = Order(component.units)
        self.groups: list[Group] = []
        self.ring: Ring | None = None
        self.make_slots: Callable[[Schedule], bool] = lambda _: False
        self.next_up: Callable[[Schedule], Schedule | None] = lambda _: None
        self.open_pass: Callable[[Schedule], None] = Schedule.begin_pass
        self.may_keep: Callable[[int], bool] = lambda _: False
        self._repeated: set[int] = set()
        self._kept: list[Group] = []
        self._fix(component)
        self._group_of: dict[int, Group] = {}
        self._ways = Ways(self._group_of)
        self._way = self._ways.of(self.order.uses)
        self._course = Course()
        self._current: Group | None = None
        self._remaining, self.record = 0, list[int]()

    def _fix(self, component: Component) -> None:
        """Makes the group of what stays on the device whoever runs."""
        self._fixed_unit = Unit(-1, "fixed", None, [], component.fixed)
        self.fixed: Group | None = None
        if component.fixed:
            name = f"{self.name}.fixed"
            self.fixed = Group(name, [self._fixed_unit], self.store, self.transfer, self.account, resident=True)

    def rebuild(self, component: Component) -> None:
        """Takes what discovery finds now that the structure has changed; everything must be offloaded.

        Units whose tensors are the same keep their place on the host and in the order. Others are used, and so
        ordered, in the next pass. A plan must be adopted after it.
        """
        self.renew()
        self.store.forget(self._fixed_unit)
        take_over(self.component, component, self.order, self.store)
        self.component, self.is_stale, self.record = component, False, []
        self._fix(component)

    def units_and_fixed(self) -> list[Unit]:
        """Every unit, and what stays on the device as one more."""
        return [*self.component.units, self._fixed_unit]

    # ------------------------------------------------------------------ plan
    def spec(self) -> ComponentSpec:
        """This component as a plan sees it."""
        return spec_of(self.component, self.order, self.store, self.choice, self.config, self.unselected)

    def adopt(self, plan: ComponentPlan, ring: Ring | None) -> None:
        """Takes a plan: offloads everything, then cuts the groups anew."""
        self.drop_all()
        self.ring = ring
        self.groups = cut(plan, self.order, self.store, self.transfer, self.account)
        self._group_of = {unit.index: group for group in self.groups for unit in group.units}
        self._ways, self.plans = Ways(self._group_of), self.plans + 1
        self._expect()

    def pack(self) -> None:
        """Packs the units that were used, in the order of first use. Offloads all groups first."""
        self.renew()
        self.store.settle()
        self.store.pack(unit for unit in self.order.sequence if unit.index in self.order.used)

    def _expect(self) -> None:
        """Expects the pass that the earlier ones tell, and starts at its beginning."""
        self._way = self._ways.of(self.order.expected())
        self._course.expect(self._way.uses)

    def start_call(self) -> None:
        """A pipeline call begins: passes come again as in the one before."""
        if not self.is_open:
            self.order.start_call()
            self._expect()

    # ------------------------------------------------------------------ use
    def enter(self) -> None:
        """Starts a use: loads what stays resident whoever runs. Idempotent; renews what was replaced meanwhile."""
        self.store.wake()
        if self.fixed is None:
            return
        if self.fixed.state is GroupState.READY and self.fixed.outdated():
            self.fixed.offload(None)
        self.fixed.start_onload(None)
        self.fixed.wait_onload()

    def leave(self) -> None:
        """Ends a use: everything goes back to the host, also what an exception left on the device. Idempotent."""
        self.end_pass()
        self.drop_all()
        if self.fixed is not None:
            self.fixed.offload(None)
            if self.order.used and not self.is_closed:
                # The next use loads them with one copy. During a use they can't be packed, and a pass is during a use.
                self.store.pack([self._fixed_unit])

    def take_edits(self) -> None:
        """Takes over edits through `.data` to what is on the device."""
        for group in self._all_groups():
            group.take_edits()

    def recover(self) -> None:
        """After an interrupt: everything is offloaded, and what was being packed is looked up again. Idempotent."""
        self.abandon_pass()
        self.drop_all()
        if self.store.was_interrupted:
            if self.fixed is not None:
                self.fixed.offload(None)
            for group in self._all_groups():
                group.rebuild()
            self.store.was_interrupted = False

    def close(self) -> None:
        """Lets go of the module and its host copy, after the hooks were removed. Nothing can be used after it."""
        self.is_closed = True
        self.groups, self.fixed, self._group_of, self._course = [], None, {}, Course()
        self._ways, self._way = (none := Ways({})), none.of([])

    def _all_groups(self) -> list[Group]:
        return [*self.groups, *([self.fixed] if self.fixed is not None else [])]

    def renew(self) -> None:
        """Offloads every group and takes over what was edited on the host since."""
        self.drop_all()
        for group in self._all_groups():
            group.renew()

    def drop_all(self) -> None:
        """Offloads every group. Idempotent."""
        self.is_settled = False
        self._current = None
        for group in self.groups:
            group.offload(self.ring)
            group.forget_views()

    def drop_prefetched(self) -> bool:
        """Drops streamed groups that are loaded but not in use. Returns whether there were any."""
        streamed = [g for g in self.groups if not g.resident and g.state is not GroupState.HOST]
        found = [group for group in streamed if group is not self._current]
        for group in found:
            self._drop(group)
        self._course.draw_back(self._course.position)
        return bool(found)

    def drop_furthest(self) -> bool:
        """Drops the prefetched group that would be used last. Returns whether there was one."""
        group = self._course.furthest_loading()
        if group is None:
            return self.drop_prefetched()
        self._drop(group)
        return True

    def _drop(self, group: Group) -> None:
        self.counters.dropped += 1
        group.offload(self.ring)

    # ------------------------------------------------------------------ passes
    def begin_pass(self) -> None:
        """Opens a pass and queues the first loads. Groups that were replaced since are read anew."""
        self.end_pass()
        self._course.loads.clear()
        for group in self.groups:
            if group.state is not GroupState.HOST and group.outdated():
                group.offload(self.ring)
            if group.state is not GroupState.HOST:
                self._course.loads[group] += 1
        self.is_open, self.record = True, []
        self._repeated.clear()
        self._course.rewind()
        # Once its order is known and all of it is on the device, there is nothing to do for a unit until it is dropped.
        self.is_settled = (
            bool(self.order.used)
            and self.timer is None
            and all(group.resident and group.state is GroupState.READY for group in self.groups)
        )
        if self.is_settled:
            return
        if self.timer is not None:
            self.timer.begin()
        self.pump()

    def end_pass(self, ahead: bool = False) -> None:
        """Closes the pass: releases the group in use and takes over the recorded order. Idempotent.

        With `ahead` the first loads of what is predicted next take the slots that have become free.
        """
        if not self.is_open:
            return
        if self.tape is not None:
            self.tape.finish(self.has_inputs)
        has_room = self._let_go()
        self.has_inputs = False
        while self._kept:
            group = self._kept.pop()
            group.offload(None)
            group.resident = False
        self.is_open = False
        if self.is_settled or self.record:
            self.counters.passes += 1
        course = self.order.learn(self.record, self.store) if self.record else None
        if course is not None and (whole := self.order.whole(course)) is not None:
            self.counters.skip(*self._ways.saved(course, whole, self._course.loads))
        if self.order.is_due:
            self._course.rewind()
            return
        self._expect()
        # What was loaded for layers that the pass then skipped makes room; what the next one begins with stays.
        has_room = self._keep(self._course.ahead()) or has_room
        if has_room and ahead and self.record:
            self._load_next()

    def skips_layers(self) -> bool:
        """Whether the pass, as far as it has come, leaves out a part of one that was seen before."""
        return bool(self.record) and self.order.whole(self.record) is not None

    def abandon_pass(self) -> None:
        """Closes a pass that an exception cut short: what it recorded is no order. Idempotent."""
        self.record = []
        self.timer = self.tape = None
        self.end_pass()

    # ------------------------------------------------------------------ the hot path
    def use(self, unit: Unit) -> None:
        """Before a unit's module runs: waits (on the device) for its group, loading it now if it wasn't prefetched."""
        if self.is_settled:
            return
        if not self.is_open:
            self.has_inputs = False
            self.open_pass(self)
        index = unit.index
        self.record.append(index)
        group, timer = self._group_of[index], self.timer
        if timer is None:
            if group is not self._current:
                self._switch(group, unit)
            return
        timer.before()
        if group is not self._current:
            self._switch(group, unit)
        timer.start()

    def done(self, unit: Unit) -> None:
        """After a unit's module ran: the last one of its group frees the group's slots."""
        if self.is_settled:
            return
        if self.timer is not None:
            self.timer.end()
        self._remaining -= 1
        if self._remaining == 0:
            self._release()

    def point_again(self, unit: Unit) -> None:
        """After a unit's module ran and pointed its weights at copies of its own: they are what was loaded again."""
        if (group := self._group_of.get(unit.index)) is not None:
            group.point_again()

    def _switch(self, group: Group, unit: Unit) -> None:
        # Nothing is loaded into the slots that get free before it is known where the pass goes on.
        has_room = self._let_go()
        self._remaining = self._course.enter(group)
        if not self._remaining or (len(self.record) == 1 and unit.index != self._way.first):
            self._diverge(group)
            has_room = True
        is_new = group.state is not GroupState.READY
        if self.tape is not None:
            self.tape.before(group.name, group.size, not group.resident)
        if group.state is GroupState.HOST:
            self._load_now(group, unit.index)
        elif is_new:
            self.counters.hits += 1
        self._current = group
        group.wait_onload()
        if self.tape is not None and is_new:
            self.tape.start()
        if has_room or (is_new and self._course.horizon <= self._course.position):
            self.pump()

    def _release(self) -> None:
        if self._let_go():
            self.pump()

    def _let_go(self) -> bool:
        """Gives the slots of the group in use back. Returns whether there are any."""
        group, self._current = self._current, None
        if group is not None and self.tape is not None:
            self.tape.stop()
        if group is not None and not group.resident:
            group.offload(self.ring)
            return True
        return False

    def _diverge(self, group: Group) -> None:
        """A group is used that isn't expected now: follows the course that began like this, if one is known."""
        course = self.order.matching(self.record)
        if course is not None:
            self._way = self._ways.of(course)
            position, self._remaining = self._way.place(len(self.record))
            self._keep(self._course.follow(self._way.uses, position) | {group})
        elif not self._remaining:
            self._remaining, skipped = self._course.diverge(group)
            self._keep(set(self.groups) - set(skipped))

    def _keep(self, kept: set[Group]) -> bool:
        """Drops all other streamed groups that are on their way. Returns whether there were any."""
        others = [g for g in self.groups if g.state is GroupState.LOADING and not g.resident and g not in kept]
        for group in others:
            self._drop(group)
        return bool(others)

    def _load_now(self, group: Group, index: int) -> None:
        self.counters.misses += 1
        if index in self._repeated and not group.resident and self.may_keep(group.size):
            # Used before in this pass, whose order isn't known yet (the tiles of a VAE): it stays for the pass.
            group.resident = True
            self._kept.append(group)
        self._repeated.add(index)
        while not onload_now(group, self.groups, self.ring):
            if not self.make_slots(self):
                # Larger than the ring (its weights were replaced by larger ones): memory of its own, for this use.
                group.start_onload(None)
        self._course.reached(group)

    def pump(self) -> None:
        """Queues loads in the expected order while slots are free, then those of the pass that is predicted next."""
        if self._course.load(self.ring) and self.is_open:
            self._load_next()

    def _load_next(self) -> None:
        successor = self.next_up(self)
        if successor is self and self.is_open:
            self._course.load_next(self._ways.of(self.order.expected(self._way.course)).uses, self.ring)
        elif successor is self:
            self._course.load(self.ring)
        elif successor is not None:
            successor.prefetch()

    def prefetch(self, residents: bool = False) -> None:
        """Queues the first loads of a pass that hasn't begun; residents only once the component in use is done."""
        self._course.rewind()
        self._course.load(self.ring, residents)
