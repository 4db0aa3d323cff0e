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
import os
import threading
import time
import weakref

from .errors import LayerwiseOffloadError
from .files import Pagemap, SourceTable
from .host import HostStore
from .pieces import Piece, Route, read_into
from .staging import PORTER_ENDED, Buffer, Latch, Porter, Staging
from .tape import Copying
from .tensors import plain_tensors
from .transfer import Lease, Transfer

#: Seconds after which a caller that waits looks whether the courier is still alive.
PATIENCE = 0.5
COURIER_ENDED = "the thread that reads it has ended"


# ---------------------------------------------------------------------- one group on its way
class Ticket:
    """The load of one group, from the moment it is asked for until its last copy is queued.

    Args:
        name (`str`): The group, for errors.
        route (`Route`): What to read.
        lease (`Lease`): Where it goes.
        transfer (`Transfer`): The device.
        nbytes (`int`): What the load moves.
    """

    def __init__(self, name: str, route: Route, lease: Lease, transfer: Transfer, nbytes: int) -> None:
        self.name = name
        self.route = route
        self.lease = lease
        self.transfer = transfer
        self.nbytes = nbytes
        self.copying: Copying | None = None
        self.pid = os.getpid()
        self.courier: Courier | None = None
        self.is_cancelled = False
        self.is_started = False
        self.error: BaseException | None = None
        self.done = Latch()

    def wait(self) -> None:
        """Waits until the last copy is queued (on a CPU: done).

        Raises:
            LayerwiseOffloadError: It couldn't be read; says why.
        """
        courier = self.courier
        if courier is not None and self.pid == os.getpid():
            if not self.done.is_set():
                courier.hurry(self)
                while not self.done.wait(PATIENCE):
                    if not courier.is_alive() and not courier.revive(self):
                        self.fail(RuntimeError(COURIER_ENDED))
            if self.error is None:
                return
        if isinstance(self.error, LayerwiseOffloadError):
            raise self.error
        raise LayerwiseOffloadError(
            f"{self.name} could not be read: {self.error or COURIER_ENDED}. Call again once its file can be read, or "
            f"load the model anew."
        ) from self.error

    def fail(self, error: BaseException) -> None:
        """The load is over without all that it should have brought: nothing more is written by it. Idempotent."""
        assert self.courier is not None
        with self.courier.lock:
            if self.done.is_set():
                return
            self.error = self.error or error
            if self.is_started and not self.is_cancelled:
                self.transfer.record_ready(self.lease)
            self.done.set()
        self.courier.forget(self)

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


# ---------------------------------------------------------------------- the threads
class Courier:
    """The thread that reads, one for a process. It starts with the first load, and ends with its last user.

    On an accelerator it queues the copies as well, which takes no time. On a CPU a copy does take time, in which
    nothing would be read: there a porter does it, a second thread that is given piece after piece in order.

    Attributes:
        lock (`threading.Lock`): Held while a piece is delivered, and by whoever takes a group's memory away meanwhile.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self._gate = threading.RLock()  # what callers take: see `Latch`
        self._condition = threading.Condition(self._gate)
        self._queue: collections.deque[Ticket] = collections.deque()
        self._is_ending = False
        self._staging = Staging()
        self._pages = Pagemap() if os.path.exists("/proc/self/pagemap") else None
        self._thread: threading.Thread | None = None
        self._reading: Ticket | None = None
        self._porter = Porter(self._hand_over, self._lose)
        self.users: set[int] = set()

    def is_alive(self) -> bool:
        """Whether the thread runs, and on a CPU the one that copies for it."""
        return self._thread is not None and self._thread.is_alive() and not self._porter.is_stuck()

    def send(self, ticket: Ticket) -> None:
        """Queues a load, behind those that were queued before. What prevents it is raised when it is waited for."""
        ticket.courier = self
        with self._gate:
            self._queue.append(ticket)
        self.revive(ticket)

    def revive(self, ticket: Ticket) -> bool:
        """Has a load go on that waits, by new threads where the old ones have ended. Idempotent.

        A dying thread still runs: what it is sent meanwhile waits until somebody who needs it asks again. Tells whether
        to go on waiting: what a thread had begun is lost with it.
        """
        lost = None
        try:
            if self._porter.is_stuck():
                self._porter.revive()
            with self._gate:
                if ticket not in self._queue or not self.users:
                    return self._porter.is_busy()
                if self._thread is None or not self._thread.is_alive():
                    lost, self._reading = self._reading, None
                    self._is_ending = False
                    self._thread = threading.Thread(target=self._run, name="layerwise-courier", daemon=True)
                    self._thread.start()
                self._condition.notify_all()
        except RuntimeError as error:  # the system allows no further thread
            ticket.fail(error)
        if lost is not None:
            lost.fail(RuntimeError(COURIER_ENDED))  # the last thread died with it
        return self.is_alive()

    def hurry(self, ticket: Ticket) -> None:
        """Puts a load that is needed now before all that is only expected."""
        with self._gate:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._queue.appendleft(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Takes a load that hasn't begun out of the queue."""
        with self._gate, contextlib.suppress(ValueError):
            self._queue.remove(ticket)

    def end(self) -> None:
        """Ends the threads, which free the buffers. Doesn't wait where it is called by one of them."""
        with self._gate:
            self._is_ending = True
            self._condition.notify_all()
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._clear()
        elif threading.current_thread() is not thread and not self._porter.is_current():
            thread.join()

    def _clear(self) -> None:
        self._porter.end()
        self._staging.free()

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that the staging buffers take."""
        return self._staging.nbytes

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._is_ending:
                    self._condition.wait()
                if self._is_ending:
                    break
                self._reading = ticket = self._queue.popleft()
            error: BaseException | None = None
            try:
                self._read(ticket)
            except BaseException as found:  # kept for the caller, whose thread is the place to raise it
                error = found
            try:
                self._pass_on(ticket, None, None, error)
            except BaseException as found:  # there is no porter, and none can be started
                ticket.fail(error or found)
            del ticket, error
            self._reading = None  # nothing is kept alive by a thread that waits
        self._clear()

    def _read(self, ticket: Ticket) -> None:
        transfer, table = ticket.transfer, ticket.route.table
        for source in ticket.route.sources:
            source.check()  # before memory is touched: there is none behind a mapping of what was cut off
        with plain_tensors():
            for piece in ticket.route.pieces:
                buffer = None
                if piece.source is not None or transfer.is_async:
                    buffer = self._staging.next(transfer, self._porter.revive)
                    begin = time.perf_counter()
                    self._fill(piece, buffer, table)
                    table.count(piece.length, time.perf_counter() - begin)
                if self._is_ending:
                    raise LayerwiseOffloadError(f"{ticket.name} is no longer read: the thread that does it has to end.")
                self._pass_on(ticket, piece, buffer, None)
                if ticket.is_cancelled or ticket.done.is_set():
                    return

    def _pass_on(self, ticket: Ticket, piece: Piece | None, buffer: Buffer | None, error: BaseException | None) -> None:
        """A piece goes to the device, or (without one) the load is over: now, or by the porter."""
        if ticket.transfer.is_async:
            self._hand_over(ticket, piece, buffer, error)
            return
        if buffer is not None:
            buffer.is_idle.clear()
        try:
            self._porter.give((ticket, piece, buffer, error))
        except BaseException:
            if buffer is not None:
                buffer.is_idle.set()  # it wasn't given away
            raise

    def _lose(self, ticket: Ticket, piece: Piece | None, buffer: Buffer | None, error: BaseException | None) -> None:
        """The porter died with a piece: what it belongs to is incomplete, whoever goes on with the rest."""
        ticket.fail(error or RuntimeError(PORTER_ENDED))
        if buffer is not None:
            buffer.is_idle.set()

    def _hand_over(
        self, ticket: Ticket, piece: Piece | None, buffer: Buffer | None, error: BaseException | None
    ) -> None:
        if piece is None:
            self._finish(ticket, error)
            return
        try:
            with self.lock, plain_tensors():
                if not ticket.is_cancelled and ticket.error is None and not ticket.done.is_set():
                    _deliver(ticket, piece, buffer)
        except BaseException as found:
            ticket.error = found
        finally:
            if buffer is not None:
                buffer.is_idle.set()

    def _finish(self, ticket: Ticket, error: BaseException | None) -> None:
        try:
            with self.lock:
                if ticket.done.is_set():
                    return
                ticket.error = ticket.error or error
                if ticket.is_cancelled:
                    return
                if ticket.error is None and not ticket.is_started:
                    _begin(ticket)
                if ticket.is_started:
                    ticket.transfer.mark_stop(ticket.copying)
                    ticket.transfer.record_ready(ticket.lease)
        except BaseException as found:
            ticket.error = ticket.error or found
        finally:
            ticket.done.set()

    def _fill(self, piece: Piece, buffer: Buffer, table: SourceTable) -> None:
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
    ticket.copying = ticket.transfer.mark_start(ticket.lease, ticket.name, ticket.nbytes)


def _deliver(ticket: Ticket, piece: Piece, buffer: Buffer | None) -> None:
    """Queues a piece's copies; the courier's lock is held."""
    lease, transfer, table = ticket.lease, ticket.transfer, ticket.route.table
    if not ticket.is_started:
        _begin(ticket)
    copies = []
    for offset, memory, target in piece.slices:
        source = memory if buffer is None else buffer.tensor.narrow(0, offset, memory.numel())
        copies.append((lease.buffer.narrow(0, lease.offset + target, memory.numel()), source))
    begin = time.perf_counter()
    transfer.queue_copies(copies, None if buffer is None else buffer.free)
    if buffer is None:
        table.count(piece.length, time.perf_counter() - begin)
    else:
        buffer.is_used = transfer.is_async


# ---------------------------------------------------------------------- one for a process
_couriers: dict[int, Courier] = {}
#: Entered again by a collection of garbage that comes in the middle.
_guard = threading.RLock()


def send(ticket: Ticket) -> None:
    """Starts the load of a group, whose bytes are counted as moved."""
    ticket.transfer.copies += len(ticket.route.pieces)
    ticket.transfer.moved_bytes += ticket.nbytes
    try:
        courier = courier_for(ticket.route.table)
    except OSError as error:  # no descriptor is left: raised where it is waited for, as everything is
        ticket.error = error
        ticket.done.set()
        return
    courier.send(ticket)


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
