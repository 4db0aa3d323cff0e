"""Host memory that files are read into on their way to the device, and the thread that empties it on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
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


def most_bytes(is_async: bool) -> int:
    """Bytes of host memory that all buffers of a device take at most."""
    return (BUFFERS if is_async else CPU_BUFFERS) * BUFFER_BYTES


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


class Staging:
    """The buffers of each device, used in turn. They are made when they are needed first."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[Buffer]] = {}
        self._next: dict[torch.device, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that all buffers take."""
        return sum(buffer.tensor.numel() for buffers in list(self._buffers.values()) for buffer in buffers)

    def next(self, transfer: Transfer, is_emptied: Callable[[], bool]) -> Buffer:
        """The buffer for the next piece, once the last one has left it.

        Args:
            transfer (`Transfer`): The device.
            is_emptied (`Callable`): Whether there still is somebody who empties buffers that aren't idle.

        Raises:
            RuntimeError: There isn't.
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
            if not is_emptied():
                found.is_idle.set()
                raise RuntimeError("the thread that copies what was read has ended")
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

    Args:
        work (`Callable`): Called with what is given; must not raise.
    """

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work
        self._queue: queue.Queue[tuple[Any, ...] | None] = queue.Queue(CPU_BUFFERS)
        self._thread: threading.Thread | None = None

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def is_stuck(self) -> bool:
        """Whether something waits that nobody will do."""
        return not self.is_alive() and not self._queue.empty()

    def give(self, item: tuple[Any, ...]) -> None:
        """Gives it something to do; waits while too much is waiting.

        Raises:
            RuntimeError: The thread ended while this waited.
        """
        if not self.is_alive():
            self._thread = threading.Thread(target=self._run, name="layerwise-porter", daemon=True)
            self._thread.start()
        while True:
            try:
                self._queue.put(item, timeout=PATIENCE)
                return
            except queue.Full:
                if not self.is_alive():
                    raise RuntimeError("the thread that copies what was read has ended") from None

    def end(self) -> None:
        """Ends the thread once all is done that it was given."""
        if self.is_alive():
            self._queue.put(None)
            assert self._thread is not None
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(*item)
            del item  # nothing is kept alive by a thread that waits
