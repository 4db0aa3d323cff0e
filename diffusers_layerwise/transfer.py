"""Streams, events and slots: the only file that knows them, in device-generic terms.

Order comes from events alone. A copy waits for the free event of each slot it fills; a layer waits for the ready event
of its group. The host never waits. On a CPU execution device a copy is done when it is started, and events are None.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import platform
from .tape import Copying, Tape
from .tensors import ALIGNMENT, move_bytes

Copy = tuple[torch.Tensor, torch.Tensor]
_serials = itertools.count()
#: One for each device and process: handles on one device share its link, and a forked child makes its own.
_copy_streams: dict[tuple[torch.device, int], torch.Stream] = {}
#: Enough to hide the start-up of a copy, little enough to take 3 ms at 22 GB/s.
MEASURE_BYTES = 64 << 20


@dataclasses.dataclass(eq=False)
class Slot:
    """One page of the ring. `holder` is the lease that fills it; `free` is recorded when its last reader was queued."""

    index: int
    free: torch.Event | None
    ready: torch.Event | None
    holder: Lease | None = None


@dataclasses.dataclass(eq=False)
class Lease:
    """Device memory lent to one group: consecutive ring slots, or a buffer of its own when it is resident.

    `key` names the memory for caches of views: equal keys mean equal addresses.
    """

    buffer: torch.Tensor
    offset: int
    slots: list[Slot]
    key: tuple[int, int]
    ready: torch.Event | None
    after: list[torch.Event | None]


@dataclasses.dataclass(eq=False)
class Account:
    """One component's share: bytes held outside the ring now and at most, whether it used the ring, bytes moved."""

    held: int = 0
    peak: int = 0
    in_ring: bool = False
    moved: int = 0

    def hold(self, count: int) -> None:
        """Counts `count` more bytes as held (fewer when negative)."""
        self.held += count
        self.peak = max(self.peak, self.held)


class Transfer:
    """One device's copy stream, and the counters of what went through it.

    Args:
        device (`torch.device`): The execution device, with its index.

    Nothing is created on the device before the first [`Transfer.start`].
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type != "cpu"
        self.pid: int | None = None
        self.copy_stream: Any = None
        self.moved_bytes = self.copies = 0
        self.held_bytes = self.peak_bytes = self.peak_ever = 0
        self.log: list[tuple[str, str]] | None = None
        self.tape: Tape | None = None
        #: Gives up device memory that whoever has the account doesn't need now.
        self.relieve: Callable[[Account | None], None] = lambda _: None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the device belongs to the process that this one was forked from, and can't be used here."""
        return self.is_async and self.pid is not None and self.pid != os.getpid()

    def start(self) -> None:
        """Creates the copy stream in this process; raises where the device isn't there. Idempotent."""
        pid = os.getpid()
        if self.pid == pid:
            return
        if self.is_async:
            key = (self.device, pid)
            if key not in _copy_streams:
                _copy_streams[key] = platform.new_stream(self.device)
            self.copy_stream = _copy_streams[key]
        self.pid = pid

    def event(self, timing: bool = False) -> torch.Event | None:
        """A new event of the device; None on the CPU."""
        return torch.Event(device=self.device, enable_timing=timing) if self.is_async else None

    def stream(self) -> Any:
        """The stream that the caller computes on."""
        return torch.accelerator.current_stream(self.device) if self.is_async else None

    def mark(self, event: torch.Event | None) -> None:
        """Records an event on the caller's stream: it is reached when all work queued so far is done."""
        if event is not None:
            # Named, since the default is the current device's stream, which may be another device.
            event.record(torch.accelerator.current_stream(self.device))

    def wait(self, event: torch.Event | None) -> None:
        """Makes the caller's stream wait for an event; the host goes on."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Waits, on the host, for all copies queued so far: somebody is about to write to what they read."""
        if self.pid == os.getpid() and self.copy_stream is not None:
            self.copy_stream.synchronize()

    def start_copies(self, copies: Sequence[Copy], lease: Lease, name: str, count: int) -> None:
        """Queues copies on the copy stream, behind the lease's `after` events and before its ready event."""
        self.copies += len(copies)
        self.moved_bytes += count
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            with torch.profiler.record_function(f"layerwise onload {name}"):
                self._copy(copies, lease, name, count)
        else:
            self._copy(copies, lease, name, count)

    def _copy(self, copies: Sequence[Copy], lease: Lease, name: str, count: int) -> None:
        self.wait_until_free(lease)
        copying = self.mark_start(lease, name, count)
        if self.is_async:
            self.queue_copies(copies, lease.ready)
        else:
            for target, source in copies:
                target.copy_(source)
        self.mark_stop(copying)

    def mark_start(self, lease: Lease, name: str, count: int) -> Copying | None:
        """While a pass is recorded: a group's copy begins here on the copy stream, behind all that it waits for."""
        tape = self.tape
        return None if tape is None else tape.copy(name, count, bool(lease.slots), self.time_mark(copying=True))

    def mark_stop(self, copying: Copying | None) -> None:
        """And here it is over."""
        if copying is not None:
            copying.stop = self.time_mark(copying=True)

    def wait_until_free(self, lease: Lease) -> None:
        """Puts the copy stream behind the last readers of a lease's memory."""
        for event in lease.after if self.is_async else ():
            if event is not None:
                self.copy_stream.wait_event(event)

    def record_ready(self, lease: Lease) -> None:
        """Records a lease's ready event behind what the copy stream has been given so far."""
        if lease.ready is not None:
            lease.ready.record(self.copy_stream)

    def queue_copies(self, copies: Sequence[Copy], done: torch.Event | None) -> None:
        """Queues copies without a wait before or a ready event after them; `done` is reached when they are over."""
        if not self.is_async:
            for target, source in copies:
                move_bytes(target, source)
            return
        with self._copying():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            if done is not None:
                done.record(self.copy_stream)

    def _copying(self) -> Any:
        if hasattr(self.copy_stream, "__enter__"):
            return self.copy_stream
        return torch.get_device_module(self.device).stream(self.copy_stream)

    def new_buffer(self, count: int) -> torch.Tensor:
        """`count` bytes of device memory, counted; the first `ALIGNMENT` bytes are added so that no view starts at 0.

        The allocator may hand out memory that kernels queued on the caller's stream still read: whoever fills it from
        the copy stream must wait for an event marked after this call.
        """
        with torch.inference_mode(False):
            buffer = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device=self.device)
        self.hold(buffer.numel())
        return buffer

    def allocate(self, count: int, account: Account | None = None) -> torch.Tensor:
        """[`Transfer.new_buffer`], tried again after giving up what isn't needed now when there is no memory."""
        try:
            return self.new_buffer(count)
        except torch.OutOfMemoryError:
            self.relieve(account)
        return self.new_buffer(count)

    def hold(self, count: int) -> None:
        """Counts `count` more bytes of weights as held on the device (fewer when negative)."""
        self.held_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.peak_ever = max(self.peak_ever, self.held_bytes)

    def start_peak(self) -> None:
        """Starts `peak_bytes` anew: a new plan is in force. `peak_ever` goes on."""
        self.peak_bytes = self.held_bytes

    def drop_buffer(self, buffer: torch.Tensor) -> None:
        """Counts a buffer as given back; the caller drops the last reference after it."""
        self.hold(-buffer.numel())

    def new_lease(self, count: int, account: Account) -> Lease:
        """A lease of `count` bytes outside the ring, for a resident group."""
        buffer = self.allocate(count, account)
        account.hold(buffer.numel())
        after = self.event()
        self.mark(after)
        lease = Lease(buffer, ALIGNMENT, [], (next(_serials), ALIGNMENT), self.event(), [after])
        order_before_free(lease, self.stream(), [lease.ready])
        return lease

    def drop_lease(self, lease: Lease, account: Account) -> None:
        """Gives a resident group's memory back, once the caller's stream is behind the copy that filled it."""
        self.wait(lease.ready)
        account.hold(-lease.buffer.numel())
        self.drop_buffer(lease.buffer)

    def time_mark(self, copying: bool = False) -> Any:
        """A point in time on the caller's stream, or the copy stream: a timing event, or a CPU's wall clock."""
        if not self.is_async:
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(self.copy_stream if copying else torch.accelerator.current_stream(self.device))
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether a point in time has been reached."""
        return True if isinstance(mark, float) else bool(mark.query())

    def await_mark(self, mark: Any) -> None:
        """Waits, on the host, for a point in time: somebody asks between passes what was recorded."""
        if not self.is_past(mark):
            mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two points in time that are both past."""
        return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1e3

    def time_copy(self, target: torch.Tensor, source: torch.Tensor) -> float:
        """Seconds of one copy. Waits on the host: for use before steady state only."""
        start = self.time_mark(copying=True)
        with self._copying() if self.is_async else contextlib.nullcontext():
            target.copy_(source, non_blocking=self.is_async)
        stop = self.time_mark(copying=True)
        self.await_mark(stop)
        return self.seconds(start, stop)


def order_before_free(owner: object, stream: Any, events: list[torch.Event | None]) -> Callable[[], object]:
    """Puts the stream that memory was allocated on behind the copies into it, once its owner is nobody's any more.

    A module that is dropped leaves copies in flight, and the allocator would lend their target to somebody else.
    Returns what calls it off.
    """
    finalizer = weakref.finalize(owner, _wait_all, stream, events, os.getpid())
    finalizer.atexit = False
    return finalizer.detach


def _wait_all(stream: Any, events: list[torch.Event | None], pid: int) -> None:
    if pid == os.getpid():
        for event in events:
            if event is not None:
                stream.wait_event(event)


class Ring:
    """Equal slots in one byte slab; a group takes as many consecutive ones as it needs.

    Args:
        transfer (`Transfer`): The device.
        slot_bytes (`int`): Bytes of one slot.
        count (`int`): Number of slots.

    Most groups fit one slot; an embedding table that doesn't takes several, so that it doesn't set the size of all.
    The slab is allocated at the first lease and lent out in turn, so in steady state each slot's next occupant follows
    the one that was used up longest ago.
    """

    def __init__(self, transfer: Transfer, slot_bytes: int, count: int) -> None:
        self.transfer = transfer
        self.slot_bytes = slot_bytes
        self.count = count
        self.slab: torch.Tensor | None = None
        self.slots: list[Slot] = []
        self._cursor = 0
        self._serial = -1
        self._leases: dict[tuple[int, int], Lease] = {}
        self._call_off: Callable[[], object] = lambda: None

    @property
    def nbytes(self) -> int:
        """Bytes that the slab takes on the device."""
        return self.slot_bytes * self.count + ALIGNMENT if self.count else 0

    def open(self) -> None:
        """Allocates the slab. Idempotent."""
        if self.slab is not None or not self.count:
            return
        self.slab = self.transfer.allocate(self.slot_bytes * self.count)
        self._serial = next(_serials)
        event = self.transfer.event
        stream = self.transfer.stream()
        self.slots = [Slot(index, event(), event()) for index in range(self.count)]
        for slot in self.slots:
            self.transfer.mark(slot.free)
        self._call_off = order_before_free(self, stream, [slot.ready for slot in self.slots])

    def has_room(self) -> bool:
        """Whether any slot is free: a quick look that saves the caller's preparations."""
        return not self.slots or any(slot.holder is None for slot in self.slots)

    def lease(self, count: int) -> Lease | None:
        """Slots for `count` bytes, or None while too few consecutive ones are free."""
        self.open()
        need = -(-count // self.slot_bytes)
        for start in self._starts(need):
            lease = self._leases.get((start, need)) or self._new_lease(start, need)
            if all(slot.holder is None for slot in lease.slots):
                for slot in lease.slots:
                    slot.holder = lease
                self._cursor = (start + need) % self.count
                return lease
        return None

    def _new_lease(self, start: int, need: int) -> Lease:
        """The lease of `need` slots from `start`: the same object every time."""
        assert self.slab is not None
        slots = self.slots[start : start + need]
        offset = ALIGNMENT + start * self.slot_bytes
        lease = Lease(self.slab, offset, slots, (self._serial, offset), slots[0].ready, [slot.free for slot in slots])
        self._leases[start, need] = lease
        return lease

    def measure(self, source: torch.Tensor) -> tuple[float, float]:
        """(bytes per second, seconds of latency) of copies from `source`, page-locked like what will be streamed.

        Times a long and a short copy into the slab, all slots being free. Waits on the host.
        """
        self.open()
        assert self.slab is not None
        for slot in self.slots:
            if slot.free is not None:
                self.transfer.copy_stream.wait_event(slot.free)
        long = min(source.numel(), self.slab.numel(), MEASURE_BYTES)
        short = max(1, long // 8)
        times = []
        for count in (long, long, short):
            times.append(self.transfer.time_copy(self.slab.narrow(0, 0, count), source.narrow(0, 0, count)))
        per_byte = max((times[1] - times[2]) / max(1, long - short), 1e-13)
        return 1 / per_byte, max(0.0, times[2] - short * per_byte)

    def _starts(self, need: int) -> list[int]:
        last = self.count - need
        return [*range(self._cursor, last + 1), *range(min(self._cursor, last + 1))]

    def give_back(self, lease: Lease, used: bool = True) -> None:
        """Frees a lease's slots for the copy stream, behind all work that the caller's stream has queued.

        With `used=False` nothing of the caller's read the slots since they were filled, and the copy stream's own
        order suffices: their free events stay as they were.
        """
        for slot in lease.slots:
            if used:
                self.transfer.mark(slot.free)
            slot.holder = None

    def recover(self) -> None:
        """Frees every slot after all groups were offloaded: an interrupt may have come between a lease and its user."""
        for slot in self.slots:
            if slot.holder is not None:
                self.transfer.mark(slot.free)
                slot.holder = None

    def close(self) -> None:
        """Gives the slab back. All leases must have been given back. Idempotent."""
        if self.slab is None:
            return
        for slot in self.slots:
            # The slab belongs to the caller's stream: it must not be handed out while a copy is still filling it.
            self.transfer.wait(slot.ready)
        self._call_off()
        self.transfer.drop_buffer(self.slab)
        self.slab = None
        self.slots = []
        self._leases = {}
        self._cursor = 0
