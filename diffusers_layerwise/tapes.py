"""Which passes of a handle's components are recorded: those under a new plan until it has settled, then none."""

from __future__ import annotations

import dataclasses

from . import platform
from .schedule import Schedule
from .tape import Tape
from .transfer import Transfer

#: The pass after a plan was adopted that shows what it gives: the first one loads what is resident.
WARM = 2


@dataclasses.dataclass
class _State:
    """One component: which of its plans is in force, the passes under it so far, and what was recorded."""

    plan: int
    passes: int = 0
    is_done: bool = False
    first: Tape | None = None
    last: Tape | None = None


class Tapes:
    """The recorded passes of each component: its first one, and the last one that was recorded.

    Args:
        transfer (`Transfer`): The device.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._states: dict[Schedule, _State] = {}
        self._looks = False

    def start(self, schedule: Schedule) -> None:
        """A pass is about to begin."""
        self._collect(schedule)
        transfer = self._transfer
        before, transfer.tape = transfer.tape, None
        state = self._states.get(schedule)
        if state is None:
            state = self._states[schedule] = _State(schedule.plans)
        if state.plan != schedule.plans:
            state.plan, state.passes, state.is_done = schedule.plans, 0, False
        schedule.tape = None
        if state.is_done:
            return
        state.passes += 1
        ring = schedule.ring
        # It goes on taking copies until the next pass begins: those may be under way then.
        schedule.tape = transfer.tape = Tape(
            schedule.counters.passes + 1,
            transfer.time_mark,
            lambda: transfer.held_bytes,
            self._allocated,
            0 if ring is None or ring.slab is None else ring.nbytes,
            len(schedule.order.uses),
            () if before is None else before.copies,
        )

    def end(self, schedule: Schedule, is_plain: bool) -> None:
        """A pass has ended. `is_plain`: its units weren't timed as well, which takes longer."""
        tape, schedule.tape = schedule.tape, None
        state = self._states.get(schedule)
        if tape is None or state is None:
            return
        if tape.last is None:
            # Nothing is done for what is resident, and its end can't be told: later passes have nothing to show either.
            state.is_done = state.passes >= WARM
            return
        tape.is_steady = state.is_done = is_plain and state.passes >= WARM and bool(schedule.order.used)
        state.first, state.last = state.first or tape, tape

    def _allocated(self) -> int | None:
        """Bytes of all tensors, where somebody wants to see them: each look costs the host some 50 us."""
        found = platform.memory_counters(self._transfer.device) if self._looks else None
        return None if found is None else found[0]

    def _collect(self, schedule: Schedule) -> None:
        """Takes in a pass that ended with its call, as a VAE's `decode` does."""
        if schedule.tape is not None and not schedule.is_open:
            self.end(schedule, schedule.timer is None)

    def arm(self) -> None:
        """Records the next passes of every component, as after a new plan; now also what all tensors take."""
        self._looks = True
        for state in self._states.values():
            state.passes, state.is_done = 0, False

    def forget(self, schedule: Schedule) -> None:
        """A component is gone, or has changed its structure."""
        self._states.pop(schedule, None)

    def of(self, schedule: Schedule) -> list[Tape]:
        """What was recorded of a component, the last pass last."""
        self._collect(schedule)
        state = self._states.get(schedule)
        found = [] if state is None else [tape for tape in (state.first, state.last) if tape is not None]
        return list(dict.fromkeys(found))
