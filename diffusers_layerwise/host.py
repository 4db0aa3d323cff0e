"""The host copy: units packed in execution order into page-locked chunks, so that a run of units is one copy.

A chunk holds the units of a stretch of execution order back to back. Any run of them is one contiguous region, whatever
groups the plan cuts, so a new plan never repacks. Weights stay where they were loaded until their component has shown
its order, and for good when the tier is pageable.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from . import platform, progress
from .config import HostTier, format_bytes
from .discovery import Unit
from .files import SourceTable
from .tensors import ALIGNMENT, Extent, view_like

#: While a chunk is packed its sources are still alive, so this bounds the extra host memory; groups don't cross chunks.
CHUNK_BYTES = 512 << 20


class Chunk:
    """One page-locked buffer of host memory. `registered` tells memory locked in place from memory allocated locked."""

    def __init__(self, count: int, device: torch.device, pin: bool) -> None:
        self.registered = False
        self.pinned = pin
        if pin and not platform.can_pin_in_place(device):
            self.buffer = platform.new_pinned(count, device)
        else:
            self.buffer = torch.empty(count, dtype=torch.uint8)
        self.device = device

    @property
    def can_lock(self) -> bool:
        """Whether there is anything for [`lock`] to do."""
        return self.pinned and not self.registered and platform.can_pin_in_place(self.device)

    def lock(self) -> None:
        """Page-locks the buffer in place, after it was written, so that its pages were placed by the writer."""
        if not self.can_lock:
            return
        platform.pin_in_place(self.buffer)
        self.registered = True
        self._unlock = weakref.finalize(self, _unpin, self.buffer.data_ptr(), os.getpid())

    def unlock(self) -> None:
        """Gives page-locked memory back as ordinary memory where that is possible in place. Idempotent."""
        if self.registered:
            self._unlock()
            self.registered = False


def _unpin(pointer: int, pid: int) -> None:
    """In a forked child memory isn't locked, and the device can't be asked."""
    if pid == os.getpid():
        platform.unpin_in_place(pointer)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a unit lies: its chunk, the byte offset in it, and its size."""

    chunk: Chunk
    offset: int
    size: int


class HostStore:
    """The host copy of one component's units.

    Args:
        device (`torch.device`): The execution device.
        tier (`HostTier`): Only pinned units are packed.
        name (`str`): The component's, for progress bars.

    Attributes:
        table (`SourceTable`, *optional*): Which memory is a view of which file, where any is read from there.
        tiers (`dict[Unit, HostTier]`): Units whose tier is another one than the component's.
        held_at_end (`dict[str, int]`, *optional*): Bytes by tier when the component was let go, for the report.
        settle (`Callable`): Decides the tiers anew, once the order is known in which units are packed.
        has_gaps (`bool`): Whether units lost their place since the last packing: their weights were replaced.
    """

    def __init__(self, device: torch.device, tier: HostTier, name: str = "weights") -> None:
        self.device = device
        self.name = name
        self.tier = tier
        self.table: SourceTable | None = None
        self.tiers: dict[Unit, HostTier] = {}
        self.settle: Callable[[], None] = lambda: None
        self.held_at_end: dict[str, int] | None = None
        self._read_before = 0
        self.notes: list[str] = []
        self.was_interrupted = False
        self.has_gaps = False
        self._is_full = False
        self._is_resting = False
        self._places: dict[Unit, Place] = {}
        self._chunks: list[Chunk] = []

    @property
    def disk_bytes(self) -> int:
        """Bytes read from files so far, past their mappings."""
        return self._read_before + (0 if self.table is None else self.table.disk_bytes)

    def close_table(self) -> None:
        """Lets the files go. What is a view of one stays a view. Idempotent."""
        self._read_before, self.table = self.disk_bytes, None

    def tier_of(self, unit: Unit) -> HostTier:
        """A unit's tier. What stays on the device in every pass is small, and in memory where the rest is in files."""
        if unit.index < 0 and not self.tier.takes_memory:
            return HostTier.PAGEABLE if self.device.type == "cpu" else HostTier.PINNED
        return self.tiers.get(unit, self.tier)

    def place(self, unit: Unit) -> Place | None:
        """Where a unit was packed; None when it still lies where it was loaded."""
        return self._places.get(unit)

    def is_staged(self, unit: Unit) -> bool:
        """Whether a unit was packed into memory that couldn't be page-locked: copies from there hold up the host."""
        place = self._places.get(unit)
        return place is not None and not place.chunk.pinned and self.device.type != "cpu"

    def rest(self) -> None:
        """Unlocks memory that was locked in place, while the component is idle. Idempotent; [`wake`] locks it again."""
        self._is_resting = True
        for chunk in self._chunks:
            chunk.unlock()

    def wake(self) -> None:
        """Locks what [`rest`] unlocked. Idempotent."""
        if self._is_resting:
            self._is_resting = False
            due = [chunk for chunk in self._chunks if chunk.can_lock]
            with progress.bar(f"{self.name}: page-locking", sum(chunk.buffer.numel() for chunk in due)) as advance:
                for chunk in due:
                    self._lock(chunk)
                    advance(chunk.buffer.numel())

    def forget(self, unit: Unit) -> None:
        """Drops a unit's place after its tensors were replaced; its bytes are then read from the new tensors."""
        place = self._places.pop(unit, None)
        if place is not None and not any(other.chunk is place.chunk for other in self._places.values()):
            self._chunks.remove(place.chunk)
            place.chunk.unlock()

    def move_out(self, unit: Unit) -> None:
        """Copies an offloaded unit to memory of its own and drops its place: it has left the component."""
        if unit not in self._places:
            return
        with torch.inference_mode(False), torch.no_grad():
            buffer, offset = torch.empty(ALIGNMENT + unit.size, dtype=torch.uint8), ALIGNMENT
            for extent in unit.extents:
                move_extent(extent, buffer, offset + extent.shift(self.device))
                offset += extent.size
        self.forget(unit)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked memory held."""
        return 0 if self._is_resting else sum(c.buffer.numel() for c in self._chunks if c.pinned)

    def pack(self, units: Iterable[Unit]) -> None:
        """Packs units that have no place yet, in the order given; each chunk's sources are freed once it is full.

        The units must be offloaded. Leaves what is in another tier than the pinned one. Idempotent.
        """
        self.has_gaps = False
        if self._is_full:
            return
        # What is mapped from a file stays there: packing would read all of it into memory.
        pinned = (unit for unit in units if self.tier_of(unit) is HostTier.PINNED)
        waiting = [unit for unit in pinned if unit not in self._places and not unit.on_disk]
        self.was_interrupted = bool(waiting)
        work = progress.bar(f"{self.name}: packing", sum(unit.size for unit in waiting))
        with torch.inference_mode(False), torch.no_grad(), work as advance:
            while waiting:
                count, size = 0, 0
                while count < len(waiting) and (count == 0 or size + waiting[count].size <= CHUNK_BYTES):
                    size += waiting[count].size
                    count += 1
                if not self._pack_chunk(waiting[:count], size, advance):
                    break
                waiting = waiting[count:]
        self.was_interrupted = False

    def _pack_chunk(self, units: Sequence[Unit], size: int, advance: Callable[[int], object]) -> bool:
        """Returns False when there is no host memory: what isn't packed stays where it is, and streams from there."""
        chunk = self._new_chunk(ALIGNMENT + size)
        if chunk is None:
            return False
        offset = ALIGNMENT
        places: dict[Unit, Place] = {}
        for unit in units:
            places[unit] = Place(chunk, offset, unit.size)
            for extent in unit.extents:
                move_extent(extent, chunk.buffer, offset + extent.shift(self.device))
                offset += extent.size
            advance(unit.size)
        self._lock(chunk)
        self._chunks.append(chunk)
        # Last: an interrupt before this leaves units without a place, which are read where their tensors point.
        self._places.update(places)
        return True

    def _new_chunk(self, count: int) -> Chunk | None:
        try:
            return Chunk(count, self.device, pin=True)
        except RuntimeError as error:
            failure = error
        try:
            chunk = Chunk(count, self.device, pin=False)
        except RuntimeError as error:
            self._is_full = True
            self.notes.append(
                f"{format_bytes(count)} of host memory could not be allocated, so weights stay where they were loaded, "
                f"and their copies are staged: {error}"
            )
            return None
        self._note_failure(count, failure)
        return chunk

    def _lock(self, chunk: Chunk) -> None:
        try:
            chunk.lock()
        except RuntimeError as error:
            self._note_failure(chunk.buffer.numel(), error)
            chunk.pinned = False

    def _note_failure(self, count: int, error: RuntimeError) -> None:
        # A failed pin looks like a device out-of-memory in some drivers' wording: say which memory it was.
        self.notes.append(
            f"{format_bytes(count)} of host memory could not be page-locked, so copies go through a small page-locked "
            f"ring: {error}"
        )
        if self.table is None:
            self.table = SourceTable()  # what the reader keeps its account of

    def release(self) -> None:
        """Makes every host copy ordinary memory again: unlocked in place, or copied out of the pinned pool."""
        for chunk in self._chunks:
            chunk.unlock()
        if not any(c.pinned and not platform.can_pin_in_place(self.device) for c in self._chunks):
            self._chunks = []
            self._places = {}
            return
        units = list(self._places)
        with progress.bar(f"{self.name}: unpacking", sum(unit.size for unit in units)) as advance:
            for unit in units:
                self.move_out(unit)
                advance(unit.size)


def move_extent(extent: Extent, buffer: torch.Tensor, offset: int) -> None:
    """Copies an extent's bytes to `buffer` at `offset` and makes its entries' host copies views of them."""
    buffer.narrow(0, offset, extent.nbytes).copy_(extent.source)
    repoint(extent, buffer, offset)


def repoint(extent: Extent, buffer: torch.Tensor, offset: int) -> None:
    """Makes an extent's host copies views of `buffer` at `offset`, which has the same bytes."""
    extent.source = buffer.narrow(0, offset, extent.nbytes)
    for entry, inner in zip(extent.entries, extent.offsets, strict=True):
        entry.host = view_like(buffer, offset + inner, entry.host)
        entry.tensor.data = entry.host
