"""How long a pass takes under the plan in force: two marks of one pass, read once they are past, never waited for."""

from __future__ import annotations

import dataclasses
from typing import Any

from .plan import ComponentPlan, GroupPlan
from .schedule import Schedule
from .tapes import WARM
from .transfer import Transfer


@dataclasses.dataclass
class _State:
    """One component: the groups that its passes ran under so far, their number, and the marks of the measured one."""

    groups: tuple[GroupPlan, ...]
    passes: int = 0
    marks: list[Any] = dataclasses.field(default_factory=list)


class PassClock:
    """Times one pass of each component under each plan.

    Args:
        transfer (`Transfer`): The device.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._states: dict[str, _State] = {}

    def begin(self, schedule: Schedule, part: ComponentPlan) -> None:
        """A pass begins."""
        state = self._states.get(schedule.name)
        if state is None or (state.groups is not part.groups and state.groups != part.groups):
            state = self._states[schedule.name] = _State(part.groups)
        state.groups = part.groups
        if len(state.marks) == 2:
            return
        state.passes += 1
        # One whose units are timed as well takes longer.
        is_fit = state.passes >= WARM and schedule.timer is None and bool(schedule.order.used)
        state.marks = [self._transfer.time_mark()] if is_fit else []

    def end(self, schedule: Schedule) -> None:
        """The pass ends. One that wasn't entered through a forward (a VAE's `decode`) has no end that can be told."""
        state = self._states.get(schedule.name)
        if state is not None and len(state.marks) == 1:
            if schedule.has_inputs:
                state.marks.append(self._transfer.time_mark())
            else:
                state.marks = []

    def stop(self) -> None:
        """The open pass was cut short."""
        for state in self._states.values():
            if len(state.marks) == 1:
                state.marks = []

    def seconds(self, name: str) -> float | None:
        """Seconds of a component's measured pass, or None before it is past."""
        state = self._states.get(name)
        if state is None or len(state.marks) < 2 or not self._transfer.is_past(state.marks[1]):
            return None
        return self._transfer.seconds(*state.marks)
