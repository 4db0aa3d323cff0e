"""What to read of checkpoint files for one group: few long reads, and where each slice of them goes on the device."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator, Sequence

import torch

from .config import HostTier
from .discovery import Unit
from .errors import LayerwiseOffloadError
from .files import Source, SourceTable
from .host import HostStore

#: A piece: long enough for a disk to be fast, short enough that reading, copying and computing overlap.
PIECE_BYTES = 4 << 20
#: Direct reads start and end on multiples of this, in the file and in memory; it is what the strictest disks want.
SECTOR = 4096
#: Parts of a file that are this near to each other are one read; what lies between them is read and left.
GAP_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Consecutive bytes of a group: where they are in memory, in which file, and where they go in the group's region.

    `source` is None where they are in no file, or have to be read through their mapping.
    """

    memory: torch.Tensor
    target: int
    source: Source | None
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.memory.numel()


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """One read of at most [`PIECE_BYTES`] of a file (or of memory) and the slices of it that go to the device.

    `slices` are (offset in the read, the same bytes in memory, offset in the group's region).
    """

    source: Source | None
    start: int
    length: int
    slices: tuple[tuple[int, torch.Tensor, int], ...]


def make_pieces(parts: Sequence[Part]) -> list[Piece]:
    """Cuts a group's parts into reads: one for each stretch of a file, however its parts lie on the device."""
    pieces = [piece for part in parts if part.source is None for piece in _memory_pieces(part)]
    by_file: dict[int, list[Part]] = {}
    for part in parts:
        if part.source is not None and part.nbytes:
            by_file.setdefault(id(part.source), []).append(part)
    for held in by_file.values():
        pieces += _file_pieces(sorted(held, key=lambda part: part.offset))
    return pieces


def _memory_pieces(part: Part) -> Iterator[Piece]:
    for start in range(0, part.nbytes, PIECE_BYTES):
        count = min(PIECE_BYTES, part.nbytes - start)
        yield Piece(None, 0, count, ((0, part.memory.narrow(0, start, count), part.target + start),))


def _file_pieces(parts: Sequence[Part]) -> Iterator[Piece]:
    """Pieces of one file, whose parts are in order of their place."""
    source = parts[0].source
    slices: list[tuple[int, torch.Tensor, int]] = []
    start = stop = -1
    for part in parts:
        done = 0
        while done < part.nbytes:
            at = part.offset + done
            if slices and (at - stop > GAP_BYTES or at - start >= PIECE_BYTES):
                yield Piece(source, start, stop - start, tuple(slices))
                slices = []
            if not slices:
                start = at // SECTOR * SECTOR
            count = min(part.nbytes - done, start + PIECE_BYTES - at)
            slices.append((at - start, part.memory.narrow(0, done, count), part.target + done))
            done += count
            stop = max(stop, at + count) if len(slices) > 1 else at + count
    if slices:
        yield Piece(source, start, stop - start, tuple(slices))


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """How a group is loaded that isn't packed: its pieces, and the files whose memory or bytes they are."""

    pieces: tuple[Piece, ...]
    sources: tuple[Source, ...]
    table: SourceTable

    @property
    def is_direct(self) -> bool:
        """Whether any of it is read past the mapping."""
        return any(piece.source is not None for piece in self.pieces)


def make_route(units: Sequence[Unit], store: HostStore) -> Route | None:
    """How a run of units is loaded that isn't copied in one go; None where it is.

    That are units which are read from files or through their mappings, or lie in memory that couldn't be page-locked.
    """
    table = store.table
    if table is None:
        return None
    parts: list[Part] = []
    sources: dict[int, Source] = {}
    target, is_staged = 0, False
    for unit in units:
        tier = store.tier_of(unit)
        is_staged |= store.is_staged(unit)
        for extent in unit.extents:
            found = None if tier.takes_memory else table.locate(extent.source.data_ptr(), extent.nbytes)
            if found is not None:
                sources[id(found[0])] = found[0]
            direct = found if tier is HostTier.FILE else None
            parts.append(Part(extent.source, target + extent.shift(store.device), *(direct or (None, 0))))
            target += extent.size
    return Route(tuple(make_pieces(parts)), tuple(sources.values()), table) if sources or is_staged else None


def read_into(source: Source, memory: memoryview, start: int, length: int) -> int:
    """Reads a stretch of a file, past the page cache where the file system can. Returns how many bytes it took.

    Raises:
        OSError: The disk couldn't be read.
        LayerwiseOffloadError: The file is shorter than it was.
    """
    wanted = -(-length // SECTOR) * SECTOR
    got = 0
    if source.direct is not None:
        try:
            got = os.preadv(source.direct, [memory[:wanted]], start)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            source.direct = None  # this file system wants another alignment, or doesn't really do it
    while got < length:
        # The rest after a short read begins anywhere, which direct reads can't.
        more = os.preadv(source.fd, [memory[got:length]], start + got)
        if more == 0:
            source.check()
            raise LayerwiseOffloadError(f"{source.path} ends at byte {start + got}, before the weights it should have.")
        got += more
    if source.direct is None and hasattr(os, "posix_fadvise"):
        # These bytes are used once in a pass: kept in memory they would only drive out others.
        os.posix_fadvise(source.fd, start, length, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(source.fd, start + length, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
    return got
