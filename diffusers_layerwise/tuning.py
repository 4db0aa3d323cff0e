"""What a handle measures: times of the first passes, and how fast the host's memory reaches the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .measure import PassTimer
from .schedule import Schedule
from .simulate import Link
from .tapes import Tapes
from .tensors import plain_tensors
from .transfer import Ring, Transfer

#: Passes whose times are measured: the first, which also shows the order, and the second, with prefetch at work.
MEASURED_PASSES = 2
#: Passes that are timed at most: those that skip layers don't count as measured.
MOST_TRIES = 8
#: Bytes read from files that tell how fast that is.
ENOUGH_BYTES = 64 << 20


class Tuner:
    """Times a few passes of each component without ever waiting for the device.

    Args:
        transfer (`Transfer`): The device.

    Attributes:
        tapes (`Tapes`): Recorded passes.
        link (`Link`, *optional*): Measured once, before steady state.
        stall (`dict[str, float]`): Seconds of a measured pass that compute waited for copies, by component.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.link: Link | None = None
        self.stall: dict[str, float] = {}
        self.tapes = Tapes(transfer)
        self._transfer = transfer
        self._timers: dict[Schedule, PassTimer] = {}
        self._count: dict[Schedule, int] = {}
        self._tries: dict[Schedule, int] = {}

    def start(self, schedule: Schedule) -> None:
        """A pass begins: it is timed if the component hasn't been timed often enough, and recorded if none was yet."""
        count, tries = self._count.get(schedule, 0), self._tries.get(schedule, 0)
        if schedule.groups and count < MEASURED_PASSES and tries < MOST_TRIES:
            schedule.timer = PassTimer(self._transfer)
        self.tapes.start(schedule)

    def end(self, schedule: Schedule) -> None:
        """A pass has ended; its marks are read once they are past."""
        timer, schedule.timer = schedule.timer, None
        self.tapes.end(schedule, is_plain=timer is None)
        if timer is None or not schedule.record:
            return
        self._tries[schedule] = self._tries.get(schedule, 0) + 1
        if schedule.record == schedule.order.uses:
            # Plans are made for whole passes: one that skips layers is no measure of them.
            self._timers[schedule] = timer
            self._count[schedule] = self._count.get(schedule, 0) + 1

    def take(self, schedule: Schedule) -> bool:
        """Gives a component the times of its last timed pass, if they are there. Returns whether they were."""
        timer = self._timers.get(schedule)
        if timer is None or not timer.is_complete():
            return False
        busy, gap, self.stall[schedule.name] = self._timers.pop(schedule).read()
        if len(busy) != len(schedule.order.uses):
            return False
        schedule.order.times = (busy, gap)
        return True

    def stalled(self, schedule: Schedule) -> float | None:
        """Seconds for which the last recorded pass waited for copies; that of a timed one before any is past."""
        for tape in reversed(self.tapes.of(schedule)):
            if all(self._transfer.is_past(mark) for mark in tape.closing()):
                waits = [(use.before, use.start) for use in tape.uses if use.start is not None]
                return sum(self._transfer.seconds(before, start) for before, start in waits)
        return self.stall.get(schedule.name)

    def link_for(self, schedules: Sequence[Schedule]) -> Link:
        """The link as far as it was measured: copies once, reads from files on the way."""
        link = self.link or Link()
        tables = [each.store.table for each in schedules if each.store.table is not None]
        loaded, seconds = sum(table.loaded for table in tables), sum(table.seconds for table in tables)
        if loaded < ENOUGH_BYTES or seconds <= 0:
            return link
        return dataclasses.replace(link, disk=loaded / seconds)

    def forget(self, schedule: Schedule) -> None:
        """A component is gone, or has changed its structure: it is timed anew."""
        self._timers.pop(schedule, None)
        self._count.pop(schedule, None)
        self._tries.pop(schedule, None)
        self.tapes.forget(schedule)

    def measure_link(self, schedule: Schedule, ring: Ring | None) -> None:
        """Times copies from a component's packed host memory. Waits on the host; does nothing the second time."""
        units = schedule.order.sequence
        place = next((p for unit in units if (p := schedule.store.place(unit)) is not None), None)
        if self.link is not None or place is None or ring is None:
            return
        with plain_tensors():
            self.link = Link(*ring.measure(place.chunk.buffer))
