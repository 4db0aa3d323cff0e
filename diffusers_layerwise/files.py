"""Checkpoint files: opened ones, which memory is a view of which file, and what was written to such memory since.

A weight that was loaded without a copy is a private mapping of its file: reading it reads the file, writing to it gives
the process a page of its own. The kernel tells both (`/proc/self/maps`, `/proc/self/pagemap`), so a weight can be read
from its file past the page cache, and an edit is never missed, whoever made it and however.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from .errors import LayerwiseOffloadError
from .headers import DTYPES, header_of

PAGE = mmap.PAGESIZE
_MAPS = Path("/proc/self/maps")
_PAGEMAP = "/proc/self/pagemap"


class Source:
    """One checkpoint file, held open: its folder may be removed, and what was opened stays readable.

    Args:
        path (`str`): The file.

    Attributes:
        fd (`int`): For reads through the page cache.
        direct (`int`, *optional*): For reads past it; None where the file system can't.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        self.direct = self._open_direct()
        self._stamp = self._now()
        self.size = self._stamp[0]

    def _open_direct(self) -> int | None:
        flag = getattr(os, "O_DIRECT", None)
        if flag is None or not hasattr(os, "preadv"):
            return None
        try:
            direct = os.open(self.path, os.O_RDONLY | flag | os.O_CLOEXEC)
        except OSError:
            return None
        self._close_direct = weakref.finalize(self, os.close, direct)
        self._close_direct.atexit = False
        if os.fstat(direct).st_ino != os.fstat(self.fd).st_ino:
            return None  # replaced between the two calls
        return direct

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self.fd)
        return found.st_size, found.st_mtime_ns

    def remember(self) -> None:
        """Takes the file as it is now for what it should be: who opened it has written it."""
        self._stamp = self._now()

    def check(self) -> None:
        """Raises when the file was written to since it was opened.

        Raises:
            LayerwiseOffloadError: It was. A file that was removed or replaced is no such case: this one is still open.
        """
        if self._now() != self._stamp:
            raise LayerwiseOffloadError(
                f"{self.path} has changed while weights were streamed from it, so they can't be had from there any "
                f"more. Load the model anew, and save to another folder than the one it was loaded from."
            )


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file: its type, shape, and where its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_layout(path: Path) -> dict[str, Stored]:
    """The tensors in a safetensors file by name, but for types that torch has no name for. Reads the header only.

    Raises:
        ValueError: This is no safetensors file, or its data is cut short.
    """
    found: dict[str, Stored] = {}
    size = path.stat().st_size
    with header_of(path) as (entries, data):
        for name, entry in entries.items():
            start, stop = (data + int(offset) for offset in entry["data_offsets"])
            if entry["dtype"] in DTYPES:
                found[name] = Stored(DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
    if any(stored.stop > size for stored in found.values()):
        raise ValueError(f"{path} is cut short: it has {size} bytes, and its header tells of more.")
    return found


# ---------------------------------------------------------------------- memory that is a view of a file
@dataclasses.dataclass(frozen=True)
class FileMapping:
    """A range of this process's memory that is a private view of a file, by the kernel's word."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    path: str


def file_mappings() -> list[FileMapping]:
    """The private views of files in this process's memory, in order of address; none where the system doesn't say."""
    try:
        lines = _MAPS.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        parts = line.split(None, 5)
        if len(parts) < 6 or parts[1][3:4] != b"p" or parts[4] == b"0" or parts[5].startswith(b"/memfd:"):
            continue  # files that exist in memory only are memory
        start, stop = (int(number, 16) for number in parts[0].split(b"-"))
        major, minor = (int(number, 16) for number in parts[3].split(b":"))
        path = os.fsdecode(parts[5].replace(b"\\012", b"\n"))
        found.append(FileMapping(start, stop, int(parts[2], 16), os.makedev(major, minor), int(parts[4]), path))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """Memory that is a view of a file. `storage` is held, so that the addresses stay what they are."""

    start: int
    stop: int
    source: Source
    offset: int
    storage: torch.UntypedStorage


class SourceTable:
    """Which memory of one component is a view of which file.

    Looked up by address: a tensor that was replaced or pointed elsewhere isn't found, and so is read from memory.

    Attributes:
        disk_bytes (`int`): Bytes read from files past the mapping so far.
        loaded (`int`), seconds (`float`): Bytes that were brought from files, read or through the mapping, and how long
            that took.
    """

    def __init__(self) -> None:
        self._views: list[View] = []
        self._starts: list[int] = []
        self.disk_bytes = 0
        self.loaded = 0
        self.seconds = 0.0

    def add(self, view: View) -> None:
        """Adds a view."""
        position = bisect.bisect(self._starts, view.start)
        self._starts.insert(position, view.start)
        self._views.insert(position, view)

    def count(self, nbytes: int, seconds: float) -> None:
        """Counts what was brought from files, and how long it took."""
        self.loaded += nbytes
        self.seconds += seconds

    def locate(self, pointer: int, count: int) -> tuple[Source, int] | None:
        """The file and offset that `count` bytes of memory from `pointer` on are a view of, or None."""
        position = bisect.bisect(self._starts, pointer) - 1
        if position < 0:
            return None
        view = self._views[position]
        if pointer + count > view.stop:
            return None
        return view.source, view.offset + pointer - view.start


# ---------------------------------------------------------------------- what was written to it
class Pagemap:
    """Tells which pages of this process's private views were written to, and so are no longer the file's.

    Belongs to the process that made it; a forked child needs its own.
    """

    def __init__(self) -> None:
        self._fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)

    def written(self, pointer: int, count: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of each stretch that has pages of our own, within `count` bytes from `pointer` on."""
        first, last = pointer // PAGE, -(-(pointer + count) // PAGE)
        raw = os.pread(self._fd, 8 * (last - first), 8 * first)
        if len(raw) != 8 * (last - first):
            yield 0, count  # nothing is known: as if all were ours
            return
        flags = torch.frombuffer(bytearray(raw), dtype=torch.int64)
        # Bit 63: in memory. Bit 62: swapped out. Bit 61: a page of the file. One in neither place was never touched.
        ours = ((flags < 0) & ((flags >> 61) & 1 == 0)) | ((flags >> 62) & 1 == 1)
        if not bool(ours.any()):
            return
        for page in ours.nonzero().flatten().tolist():
            start = max(pointer, (first + page) * PAGE)
            yield start - pointer, min(pointer + count, (first + page + 1) * PAGE) - start


@functools.lru_cache(maxsize=1)
def can_tell_edits() -> bool:
    """Whether this system tells which pages of a private view were written to: tried out once, on this very file."""
    try:
        pages = Pagemap()
        with open(__file__, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, AttributeError, ValueError):
        return False
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    tensor[0].item()
    before = list(pages.written(tensor.data_ptr(), 1))
    tensor[0] = 0
    return before == [] and list(pages.written(tensor.data_ptr(), 1)) == [(0, 1)]
