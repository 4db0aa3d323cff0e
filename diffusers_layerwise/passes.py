"""Whose pass comes next: as in the previous call, else as it went on last time in this one."""

from __future__ import annotations

from .schedule import Schedule


class PassLog:
    """The order in which components' passes began, in the previous call and in this one."""

    def __init__(self) -> None:
        self._log: list[Schedule] = []
        self._previous: list[Schedule] = []
        self._at = 0

    def start_call(self) -> None:
        """What was logged so far becomes the prediction."""
        self._previous, self._log, self._at = self._log, [], 0

    def add(self, schedule: Schedule) -> None:
        """A pass begins."""
        self._log.append(schedule)
        try:
            self._at = self._previous.index(schedule, self._at) + 1
        except ValueError:
            self._at = len(self._previous) + 1

    def forget(self, schedule: Schedule) -> None:
        """A component is gone."""
        self._log = [s for s in self._log if s is not schedule]
        self._previous = [s for s in self._previous if s is not schedule]

    def next_up(self, schedule: Schedule) -> Schedule | None:
        """Whose pass is predicted after the open one of `schedule`; None when that is the call's last one."""
        if self._at < len(self._previous):
            return self._previous[self._at]
        if self._at == len(self._previous) and self._previous:
            return None
        for position in range(len(self._log) - 2, -1, -1):
            if self._log[position] is schedule:
                return self._log[position + 1]
        return None

    def is_over(self, schedule: Schedule) -> bool:
        """Whether the previous call's order says that this component isn't used again in this call."""
        known = bool(self._previous) and self._at <= len(self._previous)
        return known and schedule not in self._previous[self._at :]
