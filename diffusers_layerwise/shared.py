"""One copy of the same weights for all ranks on a host: in memory that nobody can write to, mapped privately by each.

The first rank that comes writes the weights of a component into a file that exists in memory only (a memfd), seals it,
and tells the others by the process group's store where it is. They map it, compare every byte with what they have, and
let go of their own where it is the same. A page that a rank writes to later becomes its own, as with any private map.
The file goes with the last map of it, also after a crash: it has no name.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .discovery import Component
from .errors import LayerwiseOffloadError
from .files import Source, SourceTable, View
from .host import repoint
from .ranks import is_initialized
from .tensors import Entry, Extent, plain_tensors

try:
    import fcntl
except ImportError:  # not on Linux: `why_impossible` says so
    fcntl = None  # type: ignore[assignment]

#: How often another rank is asked whether it has written its copy, and for how long, in seconds.
INTERVAL = 0.02
PATIENCE = 600.0
#: Copies of one layout that differ or are gone, before this gives up and keeps its own memory.
MOST_COPIES = 8
COMPARE_BYTES = 8 << 20
_PREFIX = "diffusers-layerwise"
#: Linux's numbers: sealed against further seals, shrinking, growing and writing.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 0x1 | 0x2 | 0x4 | 0x8
_numbers = itertools.count()


def why_impossible() -> str | None:
    """Says why ranks can't share host memory here, and what to do, or None when they can."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memory files (Linux has). Leave it out"
    if not is_initialized():
        return (
            "there is no process group by which ranks could find each other's copy. Call "
            "torch.distributed.init_process_group() first, or leave it out"
        )
    return None


def share(component: Component, table: SourceTable) -> tuple[int, str | None]:
    """Makes a component's weights views of the one copy that the ranks of this host have of them.

    Args:
        component (`Component`): Its units must be offloaded. Parameter objects stay what they are.
        table (`SourceTable`): Gets the views. What it has already, a map of a checkpoint, is shared by the page cache.

    Returns:
        The bytes that stay in memory of this rank's own, because no other rank has the same, and why there is no shared
        copy at all, if there is none.
    """
    extents = [
        extent
        for unit in component.units
        for extent in unit.extents
        if extent.nbytes and table.locate(extent.source.data_ptr(), extent.nbytes) is None
    ]
    if not extents:
        return 0, None
    places, size = _places(extents)
    try:
        found = _Rendezvous(component.name, extents).meet(size)
        if isinstance(found, Source):
            taken = _take_equal(extents, places, found, table)
        else:
            taken = _write(extents, places, found, table)
    except (OSError, RuntimeError) as error:
        # A host without room for the copy, or a rank that went away: what was pointed at it so far is complete.
        return sum(e.nbytes for e in extents if not _is_taken(e, table)), str(error)
    _return_freed()
    return sum(e.nbytes for e in extents) - taken, None


def _return_freed() -> None:
    """Has the C library give back what was freed: it keeps blocks of less than 32 MiB, which most weights are."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _places(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """Where each extent begins in the file: as far from an aligned address as where it was loaded."""
    places, size = [], 0
    for extent in extents:
        places.append(size + extent.lead)
        size += extent.size
    return places, size


def _is_taken(extent: Extent, table: SourceTable) -> bool:
    return table.locate(extent.source.data_ptr(), extent.nbytes) is not None


class _Offer:
    """A copy that this rank is to write, and how it tells the others."""

    def __init__(self, store: Any, key: str, size: int) -> None:
        self.store, self.key, self.size = store, key, size
        try:
            self.fd = os.memfd_create(_PREFIX, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
        except OSError:
            self.withdraw()
            raise
        self.path = f"/proc/self/fd/{self.fd}"

    def seal(self, source: Source) -> None:
        """From here on the file can't be written to, by anybody; the others may have it."""
        fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
        self.store.set(self.key, f"{os.getpid()} {source.fd} {os.fstat(source.fd).st_ino}")

    def withdraw(self) -> None:
        """There will be no copy: the others shall not wait for it."""
        self.store.set(self.key, "")

    def close(self) -> None:
        """Closes this file descriptor; the source and the maps have their own."""
        os.close(self.fd)


class _Rendezvous:
    """Finds the copy of some weights that another rank of this host has, or says that this rank is the first."""

    def __init__(self, name: str, extents: Sequence[Extent]) -> None:
        layout = [[e.nbytes, e.lead, [_described(entry) for entry in e.entries]] for e in extents]
        digest = hashlib.sha256(json.dumps([name, layout]).encode()).hexdigest()
        # Ranks in other containers of a host can't open each other's files: a process has another number there.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._key = f"{_PREFIX}/{boot}/{os.readlink('/proc/self/ns/pid')}/{digest}"
        self._store = torch.distributed.distributed_c10d._get_default_store()

    def meet(self, size: int) -> Source | _Offer:
        """The other rank's copy, whole, or an offer to write one.

        Raises:
            LayerwiseOffloadError: None of the copies that were offered can be had.
        """
        for number in range(MOST_COPIES):
            key = f"{self._key}/{number}"
            mine = f"{os.getpid()} {_started(os.getpid())} {next(_numbers)}"
            owner = self._store.compare_set(key, "", mine).decode()
            if owner == mine:
                return _Offer(self._store, f"{key}/copy", size)
            found = self._await(f"{key}/copy", owner, size)
            if found is not None:
                return found
        raise LayerwiseOffloadError(f"{MOST_COPIES} copies were offered by other ranks, and none can be had any more")

    def _await(self, key: str, owner: str, size: int) -> Source | None:
        """Another rank's copy once it is written; None if that rank is gone, or has let go of it."""
        process, started, _ = owner.split()
        end = time.monotonic() + PATIENCE
        while not self._store.check([key]):
            if _started(int(process)) != started or time.monotonic() > end:
                return None
            time.sleep(INTERVAL)
        said = self._store.get(key).decode().split()
        if not said:
            return None
        try:
            source = Source(f"/proc/{said[0]}/fd/{said[1]}")
            found, seals = os.fstat(source.fd), fcntl.fcntl(source.fd, _GET_SEALS)
        except OSError:
            return None
        # The number may be another file's by now.
        return source if (found.st_ino, found.st_size, seals) == (int(said[2]), size, _SEALS) else None


def _described(entry: Entry) -> list[object]:
    return [entry.name, str(entry.host.dtype), list(entry.host.shape), list(entry.host.stride())]


def _started(process: int) -> str:
    """When a process was started, which tells it from a later one of its number; empty when there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _map(source: Source) -> tuple[torch.UntypedStorage, torch.Tensor]:
    """A private map of a file: what is written to it is this process's own."""
    storage: Any = torch.UntypedStorage.from_file(source.path, False, source.size)
    with plain_tensors():
        return storage, torch.empty(0, dtype=torch.uint8).set_(storage)


def _point(extent: Extent, buffer: torch.Tensor, place: int, source: Source, table: SourceTable) -> None:
    with plain_tensors():
        repoint(extent, buffer, place)
    start = extent.source.data_ptr()
    table.add(View(start, start + extent.nbytes, source, place, buffer.untyped_storage()))


def _write(extents: Sequence[Extent], places: Sequence[int], offer: _Offer, table: SourceTable) -> int:
    """Writes the copy, and lets go of each weight's own memory as soon as it is written."""
    try:
        source = Source(offer.path)
        try:
            _, buffer = _map(source)
            for extent, place in zip(extents, places, strict=True):
                _write_all(offer.fd, extent.source, place)
                _point(extent, buffer, place, source, table)
        finally:
            source.remember()  # what is written is in use, also where the rest found no room
        offer.seal(source)
    except BaseException:
        offer.withdraw()
        raise
    finally:
        offer.close()
    return sum(extent.nbytes for extent in extents)


def _write_all(fd: int, memory: torch.Tensor, place: int) -> None:
    view = memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr()))
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], place + done)


def _take_equal(extents: Sequence[Extent], places: Sequence[int], source: Source, table: SourceTable) -> int:
    _, buffer = _map(source)
    taken = 0
    for extent, place in zip(extents, places, strict=True):
        if _is_equal(extent.source, buffer.narrow(0, place, extent.nbytes)):
            _point(extent, buffer, place, source, table)
            taken += extent.nbytes
    return taken


def _is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two stretches of memory have the same bytes, all of them; most that differ do so early."""
    starts = range(0, left.numel(), COMPARE_BYTES)
    with plain_tensors():
        return all(torch.equal(left[at : at + COMPARE_BYTES], right[at : at + COMPARE_BYTES]) for at in starts)
