"""One component: the order in which its units are used, and which group to load next.

A pass begins when the component's root is entered (or at the first unit used outside of one) and ends when it is left,
entered anew, or when another component begins. The order is recorded in every pass, with repeats, and takes effect at
the end of the pass. A wrong guess costs time, never correctness: what isn't there when it is used is loaded then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .config import LayerwiseOffloadConfig
from .course import Course
from .demand import onload_now
from .discovery import Component, Unit
from .group import Group, GroupState
from .host import HostStore
from .measure import Counters, PassTimer
from .order import Learned, Order
from .plan import Choice, ComponentPlan, ComponentSpec, group_uses
from .specs import positions, unit_specs
from .tape import Tape
from .transfer import Account, Ring, Transfer


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
        before = {unit.contents(): unit for unit in self.component.units}
        kept: dict[int, Unit] = {}
        for position, unit in enumerate(component.units):
            old = before.pop(unit.contents(), None)
            if old is not None:
                kept[old.index] = component.units[position] = old
                old.name, old.layer, old.triggers = unit.name, unit.layer, unit.triggers
        for gone in before.values():
            self.store.move_out(gone)
        self.order.restructure(component.units, kept)
        self.component, self.is_stale, self.record = component, False, []
        self._fix(component)

    def units_and_fixed(self) -> list[Unit]:
        """Every unit, and what stays on the device as one more."""
        return [*self.component.units, self._fixed_unit]

    # ------------------------------------------------------------------ plan
    def spec(self) -> ComponentSpec:
        """This component as a plan sees it: units in execution order, with measured times if there are any."""
        busy, gap = self.order.times if self.order.times is not None else (None, None)
        return ComponentSpec(
            self.name,
            unit_specs(self.order.sequence, self.store),
            positions(self.order.uses, self.order.sequence),
            self.component.fixed_size,
            self.component.weights,
            self.choice,
            self.config,
            busy,
            gap,
            self.unselected,
            self.component.others,
        )

    def adopt(self, plan: ComponentPlan, ring: Ring | None) -> None:
        """Takes a plan: offloads everything, then cuts the groups anew.

        Until the execution order has been seen each unit is a streamed group of its own, unless all are resident.
        """
        self.drop_all()
        self.ring = ring
        tables = {unit.name for unit in plan.units if unit.gathered}
        for unit in self.order.sequence:
            unit.is_gathered = unit.name in tables
        if self.order.used or all(group.resident for group in plan.groups):
            cuts = [(g.name, g.start, g.stop, g.resident) for g in plan.groups]
        else:
            cuts = [(unit.name, i, i + 1, False) for i, unit in enumerate(self.order.sequence)]
        groups: list[Group] = []
        group_of: dict[int, Group] = {}
        for name, start, stop, resident in cuts:
            units = [unit for unit in self.order.sequence[start:stop] if not unit.is_gathered]
            if not units:
                continue
            group = Group(f"{self.name}.{name}", units, self.store, self.transfer, self.account, resident)
            groups.append(group)
            group_of.update((unit.index, group) for unit in units)
        self.groups, self._group_of, self.plans = groups, group_of, self.plans + 1
        self._expect(self.order.uses)

    def pack(self) -> None:
        """Packs the units that were used, in the order of first use. Offloads all groups first."""
        self.renew()
        self.store.settle()
        self.store.pack(unit for unit in self.order.sequence if unit.index in self.order.used)

    def _expect(self, order: Sequence[int]) -> None:
        units = [unit for group in self.groups for unit in group.units]
        runs, start = [], 0
        for group in self.groups:
            runs.append((start, start + len(group.units)))
            start += len(group.units)
        order = [index for index in order if index in self._group_of]
        self._course.expect([(self.groups[g], b - a) for g, a, b in group_uses(positions(order, units), runs)])

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
        found = False
        for group in self.groups:
            if group is not self._current and not group.resident and group.state is not GroupState.HOST:
                self._drop(group)
                found = True
        self._course.draw_back(self._course.position)
        return found

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
        for group in self.groups:
            if group.state is not GroupState.HOST and group.outdated():
                group.offload(self.ring)
        self.is_open = True
        self.record = []
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

    def end_pass(self) -> None:
        """Closes the pass: releases the group in use and takes over the recorded order. Idempotent."""
        if not self.is_open:
            return
        if self.tape is not None:
            self.tape.finish(self.has_inputs)
        self._release()
        self.has_inputs = False
        while self._kept:
            group = self._kept.pop()
            group.offload(None)
            group.resident = False
        self.is_open = False
        if self.is_settled or self.record:
            self.counters.passes += 1
        if self.record and self.order.learn(self.record, self.store) is Learned.ORDER:
            self._expect(self.record)
        self._course.rewind()

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
        group = self._group_of.get(unit.index)
        if group is not None:
            group.point_again()

    def _switch(self, group: Group, unit: Unit) -> None:
        self._release()
        if len(self.record) == 1 and self.order.starts_another(unit.index):
            self._take_order(unit.index)
        self._remaining = self._course.enter(group) or self._diverge(group)
        if self.tape is not None:
            self.tape.before(group.name, group.size, not group.resident)
        if group.state is GroupState.READY:
            self._current = group
            return
        if group.state is GroupState.HOST:
            self._load_now(group, unit.index)
        else:
            self.counters.hits += 1
        self._current = group
        group.wait_onload()
        if self.tape is not None:
            self.tape.start()
        if self._course.horizon <= self._course.position:
            self.pump()

    def _release(self) -> None:
        group, self._current = self._current, None
        if group is not None and self.tape is not None:
            self.tape.stop()
        if group is not None and not group.resident:
            group.offload(self.ring)
            self.pump()

    def _take_order(self, first: int) -> None:
        """Another way through the component begins (a VAE's decode after its encode): follow that one's order."""
        self.drop_prefetched()
        self.order.take(first)
        self._expect(self.order.uses)

    def _diverge(self, group: Group) -> int:
        remaining, skipped = self._course.diverge(group)
        for each in skipped:
            if not each.resident and each.state is GroupState.LOADING:
                self._drop(each)
        return remaining

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
        self._course.reached()

    def pump(self) -> None:
        """Queues loads in the expected order while slots are free, then those of the pass that is predicted next."""
        if self._course.load(self.ring) and self.is_open:
            successor = self.next_up(self)
            if successor is self:
                self._course.load_next(self.ring)
            elif successor is not None:
                successor.prefetch()

    def prefetch(self, residents: bool = False) -> None:
        """Queues the first loads of a pass that hasn't begun; residents only once the component in use is done."""
        self._course.rewind()
        self._course.load(self.ring, residents)
