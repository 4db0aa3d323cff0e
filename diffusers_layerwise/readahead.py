"""Weights that a CPU uses where they are mapped: brought into the page cache ahead of their use.

A thread that computes on mapped weights stops at each page that isn't in the page cache, and the disk idles while it
computes. Here a second thread asks the system for the pages in the order of their use. Nothing is copied or held: what
was read stays in the cache, so that only the first pass waits for the disk, unlike reads past the cache.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence

from .files import PAGE, FileMapping, file_mappings
from .group import GroupState
from .hostmemory import automatic_budget, available_memory, local_processes
from .schedule import Schedule

#: How far ahead of the page that is waited for the system is asked to read, and how much in one request: more than a
#: device takes at once is cut off by the system without a word.
AHEAD_BYTES = 32 << 20
ASK_BYTES = 128 << 10
#: Pages that are looked at before each pass: that takes microseconds, and a part that was dropped is seen.
SAMPLES = 64
_WILLNEED, _POPULATE_READ = 3, 22

Range = tuple[int, int]


def is_worthwhile(cached: Sequence[bool], nbytes: int, room: int | None) -> bool:
    """Whether to read ahead: a page isn't in the cache, and the cache can hold all of them until they are used.

    Args:
        cached (`Sequence[bool]`): For pages here and there, whether they are in the page cache.
        nbytes (`int`): Bytes of the weights.
        room (`int`, *optional*): Bytes of host memory that may be used; None where nothing is known.

    Example:
        >>> is_worthwhile([True, False], 10, 20), is_worthwhile([True, True], 10, 20), is_worthwhile([False], 30, 20)
        (True, False, False)
    """
    return not all(cached) and (room is None or nbytes <= room)


def mapped_ranges(memory: Sequence[Range], mappings: Sequence[FileMapping]) -> list[Range]:
    """The parts of memory that are views of files, whole pages each, neighbours joined where they follow each other."""
    found: list[Range] = []
    for start, stop in memory:
        if not any(mapping.start <= start and stop <= mapping.stop for mapping in mappings):
            continue
        start, stop = start // PAGE * PAGE, -(-stop // PAGE) * PAGE
        if found and found[-1][0] <= start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def samples(ranges: Sequence[Range], count: int = SAMPLES) -> list[int]:
    """Addresses of pages, spread evenly over some ranges, the first one included."""
    total = sum(stop - start for start, stop in ranges)
    step = max(PAGE, total // count // PAGE * PAGE)
    found: list[int] = []
    skip = 0
    for start, stop in ranges:
        found += range(start + skip, stop, step)
        skip = (skip - (stop - start)) % step
    return found


class ReadAhead:
    """Brings one handle's mapped weights into the page cache before each pass that needs it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._known: tuple[list[Range], list[Range]] = ([], [])
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def start(self, schedule: Schedule) -> None:
        """A pass begins: looks whether its weights are in the page cache, and has them read if not. Idempotent."""
        if self._libc is None or schedule.transfer.is_async or (self._thread is not None and self._thread.is_alive()):
            return
        memory = _in_place(schedule)
        if memory != self._known[0]:
            self._known = (memory, mapped_ranges(memory, file_mappings()))
        ranges = self._known[1]
        cached = [self._is_cached(address) for address in samples(ranges)]
        if all(cached):
            return  # the usual case, in which the system isn't asked how much is free
        nbytes = sum(stop - start for start, stop in ranges)
        if is_worthwhile(cached, nbytes, automatic_budget(available_memory(), local_processes())):
            self._end = threading.Event()
            run = _Run(ranges, self._libc.madvise, self._end)
            self._thread = threading.Thread(target=run, name="layerwise-readahead", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Nothing more is asked for. Idempotent."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _is_cached(self, address: int) -> bool:
        flag = (ctypes.c_ubyte * 1)()
        assert self._libc is not None
        failed = self._libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), flag)
        return bool(failed) or bool(flag[0] & 1)  # where the system doesn't tell, it is left alone


class _Run:
    """The thread's work. It only gives advice: for memory that is gone meanwhile that does nothing."""

    def __init__(self, ranges: Sequence[Range], advise: Callable[..., int], end: threading.Event) -> None:
        self._pieces = [
            (at, min(ASK_BYTES, stop - at)) for start, stop in ranges for at in range(start, stop, ASK_BYTES)
        ]
        self._advise = advise
        self._end = end

    def __call__(self) -> None:
        asked, ahead = 0, AHEAD_BYTES // ASK_BYTES
        for position, piece in enumerate(self._pieces):
            while asked < min(len(self._pieces), position + ahead):
                self._ask(self._pieces[asked], _WILLNEED)
                asked += 1
            if self._end.is_set():
                return
            self._ask(piece, _POPULATE_READ)  # waits for it, and where it can't (before Linux 5.14) returns at once

    def _ask(self, piece: Range, advice: int) -> None:
        self._advise(ctypes.c_void_p(piece[0]), ctypes.c_size_t(piece[1]), advice)


def _in_place(schedule: Schedule) -> list[Range]:
    """Memory of the groups that are used where they lie, in the order of use."""
    return [
        (pointer, pointer + extent.nbytes)
        for group in schedule.groups
        if group.state is GroupState.READY and group.lease is None
        for unit in group.units
        for extent in unit.extents
        if (pointer := extent.source.data_ptr())
    ]
