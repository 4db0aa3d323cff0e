"""Weights on their way from checkpoint files to the device: what to read, and the thread that does it.

A pinned copy is queued by the caller and needs no host any more. A read from a disk ends on the host, at a time that
no stream knows, so somebody there has to wait for it before the copy can be queued. That is the courier, one thread for
a process: it reads a piece into a staging buffer, queues the piece's copy on the copy stream, and goes on to the next.
The caller only waits when the last copy of a group that it needs now isn't queued yet; for the copy itself its stream
waits, as always.

A copy stream may be given work by both threads: each group's own work is queued in order, and what comes between two of
its calls is another group's, to other memory.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

import torch

from . import platform
from .errors import LayerwiseOffloadError
from .files import PAGE, Pagemap, SourceTable
from .host import HostStore
from .pieces import PIECE_BYTES, SECTOR, Piece, Route, read_into
from .transfer import Lease, Transfer, plain_tensors

#: Staging buffers of each accelerator. They bound how far reading runs ahead of copying.
BUFFERS = 8
#: Seconds after which a caller that waits looks whether the courier is still alive.
PATIENCE = 0.5


# ---------------------------------------------------------------------- one group on its way
class Ticket:
    """The load of one group, from the moment it is asked for until its last copy is queued.

    Args:
        name (`str`): The group, for errors.
        route (`Route`): What to read.
        lease (`Lease`): Where it goes.
        transfer (`Transfer`): The device.
    """

    def __init__(self, name: str, route: Route, lease: Lease, transfer: Transfer) -> None:
        self.name = name
        self.route = route
        self.lease = lease
        self.transfer = transfer
        self.pid = os.getpid()
        self.courier: Courier | None = None
        self.is_cancelled = False
        self.is_started = False
        self.error: BaseException | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        """Waits until the last copy is queued (on a CPU: done).

        Raises:
            LayerwiseOffloadError: It couldn't be read; says why.
        """
        courier = self.courier
        if not self.done.is_set() and courier is not None and self.pid == os.getpid():
            courier.hurry(self)
            while not self.done.wait(PATIENCE):
                if not courier.is_alive():
                    break
        if self.done.is_set() and self.error is None and self.pid == os.getpid():
            return
        if isinstance(self.error, LayerwiseOffloadError):
            raise self.error
        reason = "the thread that reads it has ended" if self.error is None else str(self.error)
        raise LayerwiseOffloadError(
            f"{self.name} could not be read: {reason}. Call again once its file can be read, or load the model anew."
        ) from self.error

    def cancel(self) -> None:
        """Makes sure that nothing more is written to the lease's memory but what the copy stream has already."""
        if self.pid != os.getpid() or self.courier is None:
            return  # in a forked child: the thread is the parent's, and so is what it writes to
        with self.courier.lock:
            unfinished = not self.done.is_set()
            self.is_cancelled = True
            if unfinished and self.is_started:
                # Whoever gives the memory away waits for this event.
                self.transfer.record_ready(self.lease)
        self.courier.forget(self)


# ---------------------------------------------------------------------- the thread
class _Buffer:
    """Page-aligned host memory that one piece is read into. `free` is reached when the piece has been copied out."""

    def __init__(self, transfer: Transfer) -> None:
        count = PIECE_BYTES + 2 * SECTOR
        self.free = transfer.event()
        self.is_used = False
        self._locked: Any = None
        with plain_tensors():
            self.tensor = self._allocate(transfer, count)
        at = self.tensor.data_ptr()
        self.memory = memoryview((ctypes.c_char * self.tensor.numel()).from_address(at)).cast("B")

    def _allocate(self, transfer: Transfer, count: int) -> torch.Tensor:
        if transfer.is_async and not platform.can_pin_in_place(transfer.device):
            with contextlib.suppress(RuntimeError):
                whole = platform.new_pinned(count + PAGE, transfer.device)
                return whole.narrow(0, -whole.data_ptr() % PAGE, count)
        tensor = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
        if transfer.is_async:
            # Not locked, copies are staged by the driver: slower, and as right.
            with contextlib.suppress(RuntimeError):
                platform.pin_in_place(tensor)
                self._locked = weakref.finalize(self, _unpin, tensor.data_ptr(), os.getpid())
        return tensor

    def wait(self) -> None:
        """Waits on the host, in the courier's thread, until the last piece has left the buffer."""
        if self.is_used and self.free is not None:
            self.free.synchronize()
        self.is_used = False


def _unpin(pointer: int, pid: int) -> None:
    """In a forked child memory isn't locked, and the device can't be asked."""
    if pid == os.getpid():
        platform.unpin_in_place(pointer)


class Courier:
    """The thread that reads, one for a process. It starts with the first load, and ends with its last user.

    Attributes:
        lock (`threading.Lock`): Held while a piece is delivered, and by whoever takes a group's memory away meanwhile.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self._condition = threading.Condition()
        self._queue: collections.deque[Ticket] = collections.deque()
        self._is_ending = False
        self._buffers: dict[torch.device, list[_Buffer]] = {}
        self._next: dict[torch.device, int] = {}
        self._pages = Pagemap() if os.path.exists("/proc/self/pagemap") else None
        self._thread: threading.Thread | None = None
        self.users: set[int] = set()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def send(self, ticket: Ticket) -> None:
        """Queues a load, behind those that were queued before."""
        ticket.courier = self
        with self._condition:
            self._queue.append(ticket)
            if not self.is_alive():
                self._is_ending = False
                self._thread = threading.Thread(target=self._run, name="layerwise-courier", daemon=True)
                self._thread.start()
            self._condition.notify()

    def hurry(self, ticket: Ticket) -> None:
        """Puts a load that is needed now before all that is only expected."""
        with self._condition:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._queue.appendleft(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Takes a load that hasn't begun out of the queue."""
        with self._condition, contextlib.suppress(ValueError):
            self._queue.remove(ticket)

    def end(self) -> None:
        """Ends the thread and frees the buffers."""
        thread = self._thread
        with self._condition:
            self._is_ending = True
            self._condition.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            for buffers in self._buffers.values():
                for buffer in buffers:
                    buffer.wait()
        self._thread, self._buffers, self._next = None, {}, {}

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that the staging buffers take."""
        return sum(buffer.tensor.numel() for buffers in list(self._buffers.values()) for buffer in buffers)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._is_ending:
                    self._condition.wait()
                if self._is_ending:
                    return
                ticket = self._queue.popleft()
            try:
                self._carry(ticket)
            except BaseException as error:  # kept for the caller, whose thread is the place to raise it
                with self.lock:
                    ticket.error = error
                    if ticket.is_started and not ticket.is_cancelled:
                        ticket.transfer.record_ready(ticket.lease)
            finally:
                ticket.done.set()
            del ticket  # nothing is kept alive by a thread that waits

    def _carry(self, ticket: Ticket) -> None:
        transfer = ticket.transfer
        for source in ticket.route.sources:
            source.check()  # before memory is touched: there is none behind a mapping of what was cut off
        with plain_tensors():
            for piece in ticket.route.pieces:
                buffer = None
                if piece.source is not None or transfer.is_async:
                    buffer = self._buffer(transfer)
                    self._fill(piece, buffer, ticket.route.table)
                if self._is_ending:
                    raise LayerwiseOffloadError(f"{ticket.name} is no longer read: the thread that does it has to end.")
                with self.lock:
                    if ticket.is_cancelled:
                        return
                    _deliver(ticket, piece, buffer)
        with self.lock:
            if not ticket.is_cancelled:
                if not ticket.is_started:
                    _begin(ticket)
                transfer.record_ready(ticket.lease)

    def _buffer(self, transfer: Transfer) -> _Buffer:
        held = self._buffers.setdefault(transfer.device, [])
        count = BUFFERS if transfer.is_async else 1
        position = self._next.get(transfer.device, 0)
        if len(held) < count:
            position = len(held)
            held.append(_Buffer(transfer))
        self._next[transfer.device] = (position + 1) % count
        held[position].wait()
        return held[position]

    def _fill(self, piece: Piece, buffer: _Buffer, table: SourceTable) -> None:
        if piece.source is None:
            for offset, memory, _ in piece.slices:
                buffer.tensor.narrow(0, offset, memory.numel()).copy_(memory)
            return
        table.disk_bytes += read_into(piece.source, buffer.memory, piece.start, piece.length)
        # After the read: an edit that came before the end of it isn't missed.
        assert self._pages is not None
        for offset, memory, _ in piece.slices:
            for inner, count in self._pages.written(memory.data_ptr(), memory.numel()):
                buffer.tensor.narrow(0, offset + inner, count).copy_(memory.narrow(0, inner, count))


def _begin(ticket: Ticket) -> None:
    ticket.is_started = True
    ticket.transfer.wait_until_free(ticket.lease)


def _deliver(ticket: Ticket, piece: Piece, buffer: _Buffer | None) -> None:
    """Queues a piece's copies; the courier's lock is held."""
    lease, transfer = ticket.lease, ticket.transfer
    if not ticket.is_started:
        _begin(ticket)
    copies = []
    for offset, memory, target in piece.slices:
        source = memory if buffer is None else buffer.tensor.narrow(0, offset, memory.numel())
        copies.append((lease.buffer.narrow(0, lease.offset + target, memory.numel()), source))
    transfer.queue_copies(copies, None if buffer is None else buffer.free)
    if buffer is not None:
        buffer.is_used = True


# ---------------------------------------------------------------------- one for a process
_couriers: dict[int, Courier] = {}
#: Entered again by a collection of garbage that comes in the middle.
_guard = threading.RLock()


def send(name: str, route: Route, lease: Lease, transfer: Transfer, count: int) -> Ticket:
    """Starts the load of a group, whose `count` bytes are counted as moved."""
    transfer.copies += len(route.pieces)
    transfer.moved_bytes += count
    ticket = Ticket(name, route, lease, transfer)
    courier_for(route.table).send(ticket)
    return ticket


def courier_for(table: SourceTable) -> Courier:
    """This process's courier, which serves a table from now on."""
    with _guard:
        courier = _couriers.get(os.getpid())
        if courier is None:
            courier = Courier()
            _couriers.clear()  # a forked child: the parent's thread isn't here
            _couriers[os.getpid()] = courier
        if id(table) not in courier.users:
            courier.users.add(id(table))
            weakref.finalize(table, _leave, id(table), os.getpid()).atexit = False
        return courier


def release(store: HostStore) -> None:
    """A component's weights are read no more: its files are let go, and the thread ends with the last of them.

    What is a view of a file stays one. Idempotent.
    """
    if store.table is not None:
        _leave(id(store.table), os.getpid())
        store.close_table()


def _leave(user: int, pid: int) -> None:
    if pid != os.getpid():
        return
    with _guard:
        courier = _couriers.get(pid)
        if courier is None or user not in courier.users:
            return
        courier.users.discard(user)
        if courier.users:
            return
        del _couriers[pid]
    courier.end()


def staging_bytes() -> int:
    """Bytes of host memory that staging takes in this process."""
    courier = _couriers.get(os.getpid())
    return 0 if courier is None else courier.staging_bytes


@atexit.register
def _end_all() -> None:
    """A thread inside torch when the interpreter goes away would take the process down with it."""
    courier = _couriers.pop(os.getpid(), None)
    if courier is not None:
        courier.end()


def _renew_guard() -> None:
    global _guard
    _guard = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_guard)
