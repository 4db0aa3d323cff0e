"""Components take turns on the device: whose memory goes to whom, and who shares because they alternate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .config import Residency
from .plan import OffloadPlan, joined
from .schedule import Schedule
from .transfer import Transfer


class Owner(Protocol):
    """What a runtime is to this module."""

    transfer: Transfer
    schedules: list[Schedule]
    plan: OffloadPlan


class Sharing:
    """Which components of one runtime have device memory at the same time.

    Attributes:
        together (`set[frozenset[str]]`): Components that alternate within a step, and so share the budget.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.together: set[frozenset[str]] = set()
        self._evicted: set[Schedule] = set()

    def start_call(self) -> None:
        """Nobody has been evicted in this call."""
        self._evicted.clear()

    def forget(self, schedule: Schedule) -> None:
        """A component is gone."""
        self.together = {names for names in self.together if schedule.name not in names}

    def sorted(self) -> tuple[frozenset[str], ...]:
        """The sets in a fixed order."""
        return tuple(sorted(self.together, key=sorted))

    def make_room(self, schedule: Schedule, others: Sequence[Schedule]) -> bool:
        """Ends the use of idle components' resident groups, and drops what others prefetched.

        Returns:
            Whether it turned out that `schedule` takes turns with another one: a new plan is due.
        """
        mine = next((names for names in self.together if schedule.name in names), frozenset([schedule.name]))
        is_due = False
        for other in others:
            other.drop_prefetched()
            component = self.owner.plan.component(other.name)
            if component.residency is Residency.USE and other.name not in mine and component.resident_bytes:
                is_due = self._evict(other, schedule) or is_due
        return is_due

    def _evict(self, other: Schedule, by: Schedule) -> bool:
        held = self.owner.transfer.held_bytes
        other.drop_all()
        if self.owner.transfer.held_bytes == held:
            return False
        self._evicted.add(other)
        if by not in self._evicted:
            return False
        # They take turns within a step: each would reload its residents every time. From now on they share.
        self.together = joined(self.together, frozenset([by.name, other.name]))
        return True
