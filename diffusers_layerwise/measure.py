"""Counts passes and measures them: when each unit's weights were awaited, when it started, and when it ended.

Marks are timing events on the caller's stream (the wall clock on a CPU). They are read once they are all past, never
waited for, so measuring doesn't synchronise the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .transfer import Transfer


@dataclasses.dataclass
class Counters:
    """What a schedule has seen: passes, group uses found loaded or loading (hits), loaded on demand (misses),
    prefetched groups dropped unused, and loads (with their bytes) that passes didn't need which skipped layers."""

    passes: int = 0
    hits: int = 0
    misses: int = 0
    dropped: int = 0
    skipped: int = 0
    skipped_bytes: int = 0

    def skip(self, loads: int, nbytes: int) -> None:
        """A pass skipped layers, and with them so many loads of so many bytes."""
        self.skipped += loads
        self.skipped_bytes += nbytes


class PassTimer:
    """The marks of one pass.

    Args:
        transfer (`Transfer`): The device.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._begin: Any = None
        self._before: list[Any] = []
        self._start: list[Any] = []
        self._end: list[Any] = []

    def begin(self) -> None:
        """The pass begins; marks of an earlier, unfinished one are dropped."""
        self._before, self._start, self._end = [], [], []
        self._begin = self._transfer.time_mark()

    def before(self) -> None:
        """A unit is about to be used."""
        self._before.append(self._transfer.time_mark())

    def start(self) -> None:
        """Its weights are there."""
        self._start.append(self._transfer.time_mark())

    def end(self) -> None:
        """Its module has run."""
        self._end.append(self._transfer.time_mark())

    def is_complete(self) -> bool:
        """Whether every mark is set and past."""
        counts = {len(self._before), len(self._start), len(self._end)}
        return len(counts) == 1 and 0 not in counts and self._transfer.is_past(self._end[-1])

    def read(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """(busy, gap, stalled) in seconds: for each use, its module's run and what followed it; and all waiting.

        The time before the first use counts as the gap after the last one, where wrap-around puts it.
        """
        seconds = self._transfer.seconds
        busy = [seconds(a, b) for a, b in zip(self._start, self._end, strict=True)]
        gap = [seconds(a, b) for a, b in zip(self._end, self._before[1:], strict=False)]
        gap.append(seconds(self._begin, self._before[0]))
        stalled = sum(seconds(a, b) for a, b in zip(self._before, self._start, strict=True))
        return tuple(max(0.0, s) for s in busy), tuple(max(0.0, s) for s in gap), stalled
