"""One component: the order in which its units are used, and which group to load next.

A pass begins when the component's root is entered (or at the first unit used outside of one) and ends when it is left,
entered anew, or when another component begins. The order is recorded in every pass, with repeats, and takes effect at
the end of the pass. A wrong guess costs time, never correctness: what isn't there when it is used is loaded then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .config import LayerwiseOffloadConfig
from .demand import onload_ahead, onload_now
from .discovery import Component, Unit
from .group import Group, GroupState
from .host import HostStore
from .measure import Counters, PassTimer
from .plan import Choice, ComponentPlan, ComponentSpec, group_uses
from .specs import positions, unit_specs
from .transfer import Account, Ring, Transfer

#: A group use whose end isn't known from an earlier pass ends when the next group is used.
UNTIL_NEXT = 1 << 60


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
        is_open (`bool`): Whether a pass is open: one group at most is in use, others are loading.
        record (`list[int]`): Unit indices used so far in the open pass, or in the last one.
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
        self._is_settled = False
        self.counters = Counters()
        self.account = Account()
        self.timer: PassTimer | None = None
        self.times: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        self.sequence: list[Unit] = list(component.units)
        self.order: list[int] = [unit.index for unit in component.units]
        self.orders: dict[int, list[int]] = {}
        self.used: set[int] = set()
        self.relearn = False
        self.groups: list[Group] = []
        self.ring: Ring | None = None
        self.make_slots: Callable[[Schedule], bool] = lambda _: False
        self.next_up: Callable[[Schedule], Schedule | None] = lambda _: None
        self.open_pass: Callable[[Schedule], None] = Schedule.begin_pass
        fixed = Unit(-1, "fixed", None, [], component.fixed)
        self.fixed: Group | None = None
        if component.fixed:
            self.fixed = Group(f"{self.name}.fixed", [fixed], store, transfer, self.account, resident=True)
        self._fixed_unit = fixed
        self._group_of: dict[int, Group] = {}
        self._expected: list[tuple[Group, int]] = []
        self._position = 0
        self._horizon = 0
        self._current: Group | None = None
        self._remaining = 0
        self.record: list[int] = []

    # ------------------------------------------------------------------ plan
    def spec(self) -> ComponentSpec:
        """This component as a plan sees it: units in execution order, with measured times if there are any."""
        busy, gap = self.times if self.times is not None else (None, None)
        return ComponentSpec(
            self.name,
            unit_specs(self.sequence, self.store),
            positions(self.order, self.sequence),
            self.component.fixed_size,
            self.component.weights,
            self.choice,
            self.config,
            busy,
            gap,
            self.unselected,
        )

    def adopt(self, plan: ComponentPlan, ring: Ring | None) -> None:
        """Takes a plan: offloads everything, then cuts the groups anew.

        Until the execution order has been seen each unit is a streamed group of its own, unless all are resident.
        """
        self.drop_all()
        self.ring = ring
        if bool(self.used) or all(group.resident for group in plan.groups):
            cuts = [(g.name, g.start, g.stop, g.resident) for g in plan.groups]
        else:
            cuts = [(unit.name, i, i + 1, False) for i, unit in enumerate(self.sequence)]
        groups: list[Group] = []
        group_of: dict[int, Group] = {}
        for name, start, stop, resident in cuts:
            units = self.sequence[start:stop]
            group = Group(f"{self.name}.{name}", units, self.store, self.transfer, self.account, resident)
            groups.append(group)
            group_of.update((unit.index, group) for unit in units)
        self.groups, self._group_of = groups, group_of
        self._expect(self.order)

    def pack(self) -> None:
        """Packs the units that were used, in the order of first use. Offloads all groups first."""
        self.renew()
        self.store.pack(unit for unit in self.sequence if unit.index in self.used)

    def _expect(self, order: Sequence[int]) -> None:
        units = [unit for group in self.groups for unit in group.units]
        runs, start = [], 0
        for group in self.groups:
            runs.append((start, start + len(group.units)))
            start += len(group.units)
        self._expected = [(self.groups[g], b - a) for g, a, b in group_uses(positions(order, units), runs)]
        self._rewind()

    def _rewind(self) -> None:
        """Puts the position at the start of a pass, and the horizon behind what is loaded already."""
        self._position = 0
        self._horizon = 0
        seen: set[int] = set()
        for group, _ in self._expected:
            if group.state is GroupState.HOST or (not group.resident and id(group) in seen):
                break
            seen.add(id(group))
            self._horizon += 1

    # ------------------------------------------------------------------ use
    def enter(self) -> None:
        """Starts a use: loads what stays resident whoever runs. Idempotent; renews what was replaced meanwhile."""
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
            if self.used and not self.is_closed:
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
        self.groups, self.fixed, self._group_of, self._expected = [], None, {}, []

    def _all_groups(self) -> list[Group]:
        return [*self.groups, *([self.fixed] if self.fixed is not None else [])]

    def renew(self) -> None:
        """Offloads every group and takes over what was edited on the host since."""
        self.drop_all()
        for group in self._all_groups():
            group.renew()

    def drop_all(self) -> None:
        """Offloads every group. Idempotent."""
        self._is_settled = False
        self._current = None
        for group in self.groups:
            group.offload(self.ring)
            group.forget_views()

    def is_loaded(self) -> bool:
        """Whether any group, the fixed one left out, is on the device or on its way."""
        return any(group.state is not GroupState.HOST for group in self.groups)

    def drop_prefetched(self) -> bool:
        """Drops streamed groups that are loaded but not in use. Returns whether there were any."""
        found = False
        for group in self.groups:
            if group is not self._current and not group.resident and group.state is not GroupState.HOST:
                self._drop(group)
                found = True
        self._horizon = min(self._horizon, self._position)
        return found

    def drop_furthest(self) -> bool:
        """Drops the prefetched group that would be used last. Returns whether there was one."""
        for position in range(min(self._horizon, len(self._expected)) - 1, self._position - 1, -1):
            group = self._expected[position][0]
            if not group.resident and group.state is GroupState.LOADING:
                self._drop(group)
                self._horizon = position
                return True
        return self.drop_prefetched()

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
        self._rewind()
        # Once its order is known and all of it is on the device, there is nothing to do for a unit until it is dropped.
        self._is_settled = (
            bool(self.used)
            and self.timer is None
            and all(group.resident and group.state is GroupState.READY for group in self.groups)
        )
        if self._is_settled:
            return
        if self.timer is not None:
            self.timer.begin()
        self.pump()

    def end_pass(self) -> None:
        """Closes the pass: releases the group in use and takes over the recorded order. Idempotent."""
        if not self.is_open:
            return
        self._release()
        self.is_open = False
        if self._is_settled or self.record:
            self.counters.passes += 1
        if self.record:
            self._learn(self.record)
        self._rewind()

    def abandon_pass(self) -> None:
        """Closes a pass that an exception cut short: what it recorded is no order. Idempotent."""
        self.record = []
        self.timer = None
        self.end_pass()

    def _learn(self, record: list[int]) -> None:
        if record == self.order and not set(record) - self.used:
            self.orders[record[0]] = self.order
            return
        self.orders[record[0]] = record
        self.times = None
        fresh = set(record) - self.used
        if fresh:
            self.used |= fresh
            seen = dict.fromkeys([unit.index for unit in self.sequence if self.store.place(unit) is not None])
            order = dict.fromkeys([*seen, *record, *(unit.index for unit in self.sequence)])
            units = {unit.index: unit for unit in self.sequence}
            self.sequence = [units[index] for index in order]
            self.relearn = True
            self.order = record
        else:
            self.order = record
            self._expect(record)

    # ------------------------------------------------------------------ the hot path
    def use(self, unit: Unit) -> None:
        """Before a unit's module runs: waits (on the device) for its group, loading it now if it wasn't prefetched."""
        if self._is_settled:
            return
        if not self.is_open:
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
        if self._is_settled:
            return
        if self.timer is not None:
            self.timer.end()
        self._remaining -= 1
        if self._remaining == 0:
            self._release()

    def _switch(self, group: Group, unit: Unit) -> None:
        self._release()
        expected, position = self._expected, self._position
        if len(self.record) == 1 and unit.index in self.orders and self.orders[unit.index] is not self.order:
            self._take_order(unit.index)
            expected, position = self._expected, 0
        if position < len(expected) and expected[position][0] is group:
            self._remaining = expected[position][1]
            self._position = position + 1
        else:
            self._diverge(group)
        if group.state is GroupState.READY:
            self._current = group
            return
        if group.state is GroupState.HOST:
            self._load_now(group)
        else:
            self.counters.hits += 1
        self._current = group
        group.wait_onload()
        if self._horizon <= self._position:
            self.pump()

    def _release(self) -> None:
        group, self._current = self._current, None
        if group is not None and not group.resident:
            group.offload(self.ring)
            self.pump()

    def _take_order(self, first: int) -> None:
        """Another way through the component begins (a VAE's decode after its encode): follow that one's order."""
        self.drop_prefetched()
        self.order = self.orders[first]
        self.times = None
        self._expect(self.order)

    def _diverge(self, group: Group) -> None:
        """The group used isn't the one expected: skip to where it is, or treat it as an extra one."""
        for position in range(self._position, len(self._expected)):
            if self._expected[position][0] is group:
                for skipped, _ in self._expected[self._position : position]:
                    if skipped is not group and not skipped.resident and skipped.state is GroupState.LOADING:
                        self._drop(skipped)
                self._remaining = self._expected[position][1]
                self._position = position + 1
                self._horizon = max(self._horizon, self._position)
                return
        self._remaining = UNTIL_NEXT

    def _load_now(self, group: Group) -> None:
        self.counters.misses += 1
        while not onload_now(group, self.groups, self.ring):
            if not self.make_slots(self):
                # Larger than the ring (its weights were replaced by larger ones): memory of its own, for this use.
                group.start_onload(None)
        self._horizon = max(self._horizon, self._position)

    def pump(self) -> None:
        """Queues loads in the expected order while slots are free, then those of the pass that is predicted next."""
        self._horizon = self._load_from(self._horizon)
        if self._horizon == len(self._expected) and self.is_open:
            successor = self.next_up(self)
            if successor is self:
                self._load_from(0)
            elif successor is not None:
                successor.prefetch()

    def prefetch(self, residents: bool = False) -> None:
        """Queues the first loads of a pass that hasn't begun; residents only once the component in use is done."""
        self._rewind()
        self._horizon = self._load_from(self._horizon, residents)

    def _load_from(self, position: int, residents: bool = True) -> int:
        expected = self._expected
        wrapped = position < self._position
        while position < len(expected) and not (wrapped and position >= self._position):
            group = expected[position][0]
            if group.state is GroupState.HOST:
                if (group.resident and not residents) or not onload_ahead(group, self.ring):
                    break
            elif not group.resident and not wrapped:
                break  # loaded for an earlier use of the same pass: it is loaded again once that use is over
            position += 1
        return position
