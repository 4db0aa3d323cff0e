"""Host memory that files are read into on their way to the device, and the thread that empties it on a CPU."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import platform
from .files import PAGE
from .pieces import PIECE_BYTES, SECTOR
from .tensors import plain_tensors
from .transfer import Transfer

#: Buffers of each device. They bound how far reading runs ahead of copying; a CPU's copies are never far behind.
BUFFERS = 8
CPU_BUFFERS = 4
BUFFER_BYTES = PIECE_BYTES + 2 * SECTOR
#: Seconds after which a thread that waits looks whether the other one is still alive.
PATIENCE = 0.5
PORTER_ENDED = "the thread that copies what was read has ended"


def most_bytes(is_async: bool) -> int:
    """Bytes of host memory that all buffers of a device take at most."""
    return (BUFFERS if is_async else CPU_BUFFERS) * BUFFER_BYTES


class Latch:
    """An event that is set once, and that an interrupt can't break.

    `threading.Event` takes a lock in Python code: an interrupt there leaves it locked for good, and whoever sets the
    event waits for ever. So does `with` on a `threading.Condition`; on its lock it doesn't.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Sets it. Idempotent."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # open already
            self._gate.release()

    def wait(self, timeout: float) -> bool:
        """Waits until it is set, at most some seconds; tells whether it is."""
        if not self._is_set and self._gate.acquire(timeout=timeout):
            with contextlib.suppress(RuntimeError):
                self._gate.release()  # for others; interrupted before this, they look after their time
        return self._is_set


class Buffer:
    """Page-aligned host memory that one piece is read into.

    Attributes:
        free (`torch.Event`, *optional*): Reached when the piece has been copied out.
        is_idle (`threading.Event`): Not set while the porter has it. What wasn't given away, since reading failed, is
            idle.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.free = transfer.event()
        self.is_used = False
        self.is_idle = threading.Event()
        self.is_idle.set()
        self._locked: Any = None
        with plain_tensors():
            self.tensor = self._allocate(transfer, BUFFER_BYTES)
        at = self.tensor.data_ptr()
        self.memory = memoryview((ctypes.c_char * self.tensor.numel()).from_address(at)).cast("B")

    def _allocate(self, transfer: Transfer, count: int) -> torch.Tensor:
        in_place = transfer.is_async and platform.can_pin_in_place(transfer.device)
        if transfer.is_async and not in_place:
            with contextlib.suppress(RuntimeError):
                whole = platform.new_pinned(count + PAGE, transfer.device)
                return whole.narrow(0, -whole.data_ptr() % PAGE, count)
        tensor = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
        if in_place:
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


class Staging:
    """The buffers of each device, used in turn. They are made when they are needed first."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[Buffer]] = {}
        self._next: dict[torch.device, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that all buffers take."""
        return sum(buffer.tensor.numel() for buffers in list(self._buffers.values()) for buffer in buffers)

    def next(self, transfer: Transfer, revive: Callable[[], bool]) -> Buffer:
        """The buffer for the next piece, once the last one has left it.

        Args:
            transfer (`Transfer`): The device.
            revive (`Callable`): Makes sure that there is somebody who empties buffers that aren't idle; tells whether.

        Raises:
            RuntimeError: There isn't. The buffer stays with what waits in it.
        """
        held = self._buffers.setdefault(transfer.device, [])
        count = most_bytes(transfer.is_async) // BUFFER_BYTES
        position = self._next.get(transfer.device, 0)
        if len(held) < count:
            position = len(held)
            held.append(Buffer(transfer))
        self._next[transfer.device] = (position + 1) % count
        found = held[position]
        while not found.is_idle.wait(PATIENCE):
            if not revive():
                raise RuntimeError(PORTER_ENDED)
        found.wait()
        return found

    def free(self) -> None:
        """Gives all buffers back, once what they hold has been copied out."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.wait()
        self._buffers, self._next = {}, {}


class Porter:
    """A thread that does what it is given, in order. It starts with the first thing, and is never far behind.

    A thread can die: what it had begun is lost then and given to `lose`, what waits is done by the next one.

    Args:
        work (`Callable`): Called with what is given; must not raise.
        lose (`Callable`): Called with what a thread had begun that died meanwhile.
    """

    def __init__(self, work: Callable[..., None], lose: Callable[..., None]) -> None:
        self._work = work
        self._lose = lose
        self._gate = threading.RLock()  # what callers take: see `Latch`
        self._condition = threading.Condition(self._gate)
        self._waiting: collections.deque[tuple[Any, ...]] = collections.deque()
        self._begun: tuple[Any, ...] | None = None
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def is_current(self) -> bool:
        """Whether it is the porter who asks."""
        return self._thread is threading.current_thread()

    def is_busy(self) -> bool:
        """Whether something isn't done that it was given."""
        return bool(self._waiting) or self._begun is not None

    def is_stuck(self) -> bool:
        """Whether something waits that nobody will do."""
        return not self.is_alive() and self.is_busy()

    def revive(self) -> bool:
        """Starts the thread where none runs; what the last one had begun is lost. Idempotent. Tells whether one runs.

        Raises:
            RuntimeError: The system allows no further thread.
        """
        with self._gate:
            if not self.is_alive():
                lost, self._begun = self._begun, None
                if lost is not None:
                    self._lose(*lost)
                self._is_ending = False
                self._thread = threading.Thread(target=self._run, name="layerwise-porter", daemon=True)
                self._thread.start()
            return self.is_alive()

    def give(self, item: tuple[Any, ...]) -> None:
        """Gives it something to do; waits while too much is waiting.

        Raises:
            RuntimeError: There is no thread, and none can be started.
        """
        self.revive()
        with self._condition:
            while len(self._waiting) >= CPU_BUFFERS:
                if not self._condition.wait(PATIENCE) and not self.revive():
                    raise RuntimeError(PORTER_ENDED)
            self._waiting.append(item)
            self._condition.notify_all()

    def end(self) -> None:
        """Ends the thread once all is done that it was given."""
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._is_ending:
                    self._condition.wait()
                if not self._waiting:
                    return
                self._begun = self._waiting.popleft()
                self._condition.notify_all()
            self._work(*self._begun)
            self._begun = None  # nothing is kept alive by a thread that waits
