"""Checkpoint files in another dtype: converted once, kept by content, written whole or not at all, bounded."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import cache, progress
from .config import format_bytes
from .errors import LayerwiseOffloadError
from .files import Stored, read_layout
from .headers import DTYPES

#: Part of every key: raised when files would be written differently.
VERSION = 2
FOLDER = "weights"
MANIFEST = "manifest.json"
#: Paths of files whose content was read through, with what it was: hashing gigabytes takes seconds.
FINGERPRINTS = "fingerprints.json"
#: Bytes converted, read or hashed at a time.
PIECE_BYTES = 16 << 20
#: Unfinished entries of processes that died are removed after a day.
STALE_SECONDS = 86400
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: What is converted; whole numbers, booleans and 8-bit floats mean something else than a coarser weight.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One component in one dtype, as it lies in the cache."""

    folder: Path
    component: str
    dtype: str
    nbytes: int
    used: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d", time.localtime(self.used))
        return f"{self.folder.name}  {self.component} in {self.dtype}, {format_bytes(self.nbytes)}, used {when}"


def root() -> Path:
    """Where entries lie."""
    return cache.cache_folder() / FOLDER


def entries() -> list[Entry]:
    """All whole entries, the one that was used last first."""
    found = []
    for path in root().glob(f"*/{MANIFEST}") if root().is_dir() else ():
        held = _manifest(path.parent)
        with contextlib.suppress(OSError):  # removed by another process meanwhile
            if held is not None:
                count = sum(size for size, _, _ in held["files"].values())
                found.append(Entry(path.parent, held["component"], held["dtype"], count, path.stat().st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def clear() -> int:
    """Removes all entries, also unfinished ones. Returns the bytes that they took."""
    count = sum(p.stat().st_size for p in root().rglob("*") if p.is_file() and not p.is_symlink())
    shutil.rmtree(root(), ignore_errors=True)
    return count


def verify() -> list[str]:
    """Reads every entry through; removes those that aren't what was written, and returns their names."""
    broken = []
    for entry in entries():
        held = _manifest(entry.folder)
        files = {} if held is None else held["files"]
        if any(not _has(entry.folder / name, digest) for name, (_, digest, _) in files.items()):
            broken.append(str(entry))
            shutil.rmtree(entry.folder, ignore_errors=True)
    return broken


def converted(
    component: str,
    files: Sequence[Path],
    dtype: torch.dtype,
    kept: Sequence[str],
    limit: int,
    beside: Sequence[Path] = (),
) -> dict[str, Path]:
    """Files with the same weights in another dtype, out of the cache, or made now.

    Args:
        component (`str`): Its name, part of the key.
        files (`Sequence[Path]`): The component's safetensors files. They are only read.
        dtype (`torch.dtype`): What floating weights become, by the same rounding as `Tensor.to`.
        kept (`Sequence[str]`): Weights with one of these in their name stay as they are.
        limit (`int`): Bytes that the cache may take; what was used longest ago is removed for what is new.
        beside (`Sequence[Path]`): Files of the cache that are needed as well.

    Returns:
        The new files by the old ones' names.

    Raises:
        LayerwiseOffloadError: It is more than `limit`, or the disk is full.
    """
    name = str(dtype).removeprefix("torch.")
    key = cache.digest(VERSION, component, name, sorted(kept), [(p.name, fingerprint(p)) for p in files])
    place = root() / key
    if not _is_whole(place, files):
        room = _Room(limit, {path.parent for path in beside} | {place})
        _make(place, component, files, dtype, kept, room)
    with contextlib.suppress(OSError):
        os.utime(place / MANIFEST)
    return {path.name: place / path.name for path in files}


def fingerprint(path: Path) -> str:
    """The hash of a file's content. Known ones are looked up, as long as size and times are the same.

    Raises:
        LayerwiseOffloadError: It can't be read.
    """
    state = path.stat()
    known = cache.read(FINGERPRINTS)
    known = known if isinstance(known, dict) else {}
    # The time of change can't be set back, as that of the content can.
    stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    held = known.get(str(path.resolve()))
    if isinstance(held, list) and held[:-1] == stamp:
        return str(held[-1])
    try:
        found = _hash(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    cache.write(FINGERPRINTS, known | {str(path.resolve()): [*stamp, found]})
    return found


def _unreadable(path: Path, error: OSError) -> LayerwiseOffloadError:
    return LayerwiseOffloadError(
        f"{path} could not be read: {error.strerror or error}. Make it readable, or download it anew."
    )


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file, progress.bar(f"reading {path.name}", path.stat().st_size) as advance:
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
            advance(len(piece))
    return found.hexdigest()


def _has(path: Path, digest: str) -> bool:
    """Whether a file can be read, and its content has a hash."""
    try:
        return _hash(path) == digest
    except OSError:
        return False


def _manifest(folder: Path) -> Any:
    """What was written about an entry; None where it isn't there or isn't whole."""
    try:
        held = json.loads((folder / MANIFEST).read_text())
        names = all(isinstance(held[key], str) for key in ("component", "dtype"))
        kinds = [tuple(map(type, kept)) for kept in held["files"].values()]
        whole = names and all(kind == (int, str, int) for kind in kinds)
        return held if whole and held["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_whole(place: Path, files: Sequence[Path]) -> bool:
    """Whether an entry is there as it was written. What was touched since is read through; [`verify`] reads all."""
    held = _manifest(place)
    if held is None or set(held["files"]) != {path.name for path in files}:
        return False
    try:
        for name, (size, digest, written) in held["files"].items():
            state = (place / name).stat()
            if state.st_size != size:
                return False
            if state.st_mtime_ns != written:
                if not _has(place / name, digest):
                    return False
                os.utime(place / name, ns=(state.st_atime_ns, written))
            read_layout(place / name)
    except (OSError, ValueError):
        return False
    return True


def _make(
    place: Path, component: str, files: Sequence[Path], dtype: torch.dtype, kept: Sequence[str], room: _Room
) -> None:
    layouts = [_Layout(path, dtype, kept) for path in files]
    needed = sum(layout.nbytes for layout in layouts)
    try:
        root().mkdir(parents=True, exist_ok=True)
        room.make(needed)
        shutil.rmtree(place, ignore_errors=True)  # a broken one
        work = Path(tempfile.mkdtemp(dir=root(), prefix="new-"))
        try:
            with progress.bar(f"{component}: converting to {str(dtype).removeprefix('torch.')}", needed) as advance:
                held = {layout.source.name: layout.write(work / layout.source.name, advance) for layout in layouts}
            manifest = {"version": VERSION, "component": component, "files": held}
            manifest["dtype"] = str(dtype).removeprefix("torch.")
            (work / MANIFEST).write_text(json.dumps(manifest))
            work.replace(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if _is_whole(place, files):
            return  # another process was faster
        raise LayerwiseOffloadError(
            f"{component!r} could not be converted to {dtype}: {format_bytes(needed)} could not be written to "
            f"{root()}: {error.strerror or error}. Make room there (`diffusers-layerwise cache clear`), set "
            f"XDG_CACHE_HOME to another disk, or load with the dtype of the files."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Room:
    """Bytes that the cache may take, and folders of it that may not be removed for more."""

    limit: int
    needed: set[Path]

    def make(self, count: int) -> None:
        """Removes what was used longest ago until `count` more bytes are within the limit.

        Raises:
            LayerwiseOffloadError: They can't be.
            OSError: The disk is too full.
        """
        for path in root().glob("new-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        held = entries()
        others = [entry for entry in held if entry.folder not in self.needed]
        total = count + sum(entry.nbytes for entry in held if entry.folder in self.needed)
        if total > self.limit:
            raise LayerwiseOffloadError(
                f"Converted weights of {format_bytes(total)} are more than cache_limit, {format_bytes(self.limit)}. "
                f"Raise it, or load with the dtype of the files."
            )
        while others and total + sum(entry.nbytes for entry in others) > self.limit:
            shutil.rmtree(others.pop().folder, ignore_errors=True)  # who has it mapped keeps what is mapped
        free = shutil.disk_usage(root()).free
        if free < count:
            raise OSError(errno.ENOSPC, f"only {format_bytes(free)} are free")


class _Layout:
    """A safetensors file to be written from another one: the same tensors, some in another dtype."""

    def __init__(self, source: Path, dtype: torch.dtype, kept: Sequence[str]) -> None:
        self.source = source
        self._tensors: list[tuple[str, Stored, torch.dtype]] = []
        for name, stored in read_layout(source).items():
            is_kept = stored.dtype not in FLOATS or any(part in name for part in kept)
            self._tensors.append((name, stored, stored.dtype if is_kept else dtype))
        # The widest first: then all of them are aligned to their own width.
        self._tensors.sort(key=lambda item: (-item[2].itemsize, item[0]))
        self._head = self._header()
        self.nbytes = len(self._head) + sum(self._size(stored, kind) for _, stored, kind in self._tensors)

    def _size(self, stored: Stored, dtype: torch.dtype) -> int:
        return (stored.stop - stored.start) // stored.dtype.itemsize * dtype.itemsize

    def _header(self) -> bytes:
        found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, stored, dtype in self._tensors:
            end = offset + self._size(stored, dtype)
            found[name] = {"dtype": _NAMES[dtype], "shape": list(stored.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(found, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 256)
        return struct.pack("<Q", len(text)) + text

    def write(self, path: Path, advance: Callable[[int], object]) -> tuple[int, str, int]:
        """Writes the file to the disk. Returns its size, hash and time."""
        found, count = hashlib.sha256(), 0
        with self.source.open("rb") as source, path.open("wb") as file:
            for piece in self._pieces(source):
                file.write(piece)
                found.update(piece)
                count += len(piece)
                advance(len(piece))
            file.flush()
            os.fsync(file.fileno())
        return count, found.hexdigest(), path.stat().st_mtime_ns

    def _pieces(self, source: BinaryIO) -> Iterator[bytes]:
        yield self._head
        for _, stored, dtype in self._tensors:
            for start in range(stored.start, stored.stop, PIECE_BYTES):
                raw = self._read(source, start, min(PIECE_BYTES, stored.stop - start))
                if dtype == stored.dtype:
                    yield raw
                    continue
                values = torch.frombuffer(bytearray(raw), dtype=stored.dtype).to(dtype)
                yield values.view(torch.uint8).numpy().tobytes()

    def _read(self, source: BinaryIO, start: int, count: int) -> bytes:
        """Not through a map: where the disk fails, or the file is cut off meanwhile, that would end the process."""
        try:
            source.seek(start)
            raw = source.read(count)
        except OSError as error:
            raise _unreadable(self.source, error) from error
        if len(raw) < count:
            raise _unreadable(self.source, OSError(errno.EIO, "it was cut off meanwhile"))
        return raw
