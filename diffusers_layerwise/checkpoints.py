"""Finds where in a checkpoint's files a component's weights are: by address, or by name and by every byte."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from . import progress
from .discovery import Component
from .errors import LayerwiseOffloadError
from .files import FileMapping, Source, SourceTable, Stored, View, file_mappings, read_layout
from .tensors import Extent, plain_tensors, raw_bytes

#: Bytes compared at a time.
COMPARE_BYTES = 8 << 20
#: Headers that are kept.
MOST_HEADERS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class Finding:
    """One extent, and where its bytes are said to be. `mapping` is the view of a file that it already is."""

    extent: Extent
    path: str
    offset: int
    mapping: FileMapping | None = None


@dataclasses.dataclass(frozen=True)
class Search:
    """What looking for a component's weights has found: nothing was read but headers.

    Attributes:
        findings (`list[Finding]`): Candidates, several for a weight that more than one file has.
        missing (`int`): Bytes of units that no file has.
        folders (`list[Path]`): Where was looked.
    """

    findings: list[Finding]
    missing: int
    folders: list[Path]

    @property
    def nbytes(self) -> int:
        """Bytes that may be in files."""
        return sum(extent.nbytes for extent in {id(f.extent): f.extent for f in self.findings}.values())


def search(component: Component, checkpoint: str | None = None) -> Search:
    """Looks for a component's units in files. Changes nothing, and reads no weight.

    Memory that is a private view of a file is found by its address, as long as the file has its name. Other memory is
    looked for by name, type and shape in the files that the model says it was loaded from, or in `checkpoint`.
    """
    findings, rest = _by_address(component)
    folders = checkpoint_folders(component, checkpoint) if rest else []
    layouts = _Layouts(folders)
    by_name = [found for extent in rest for found in _named(extent, layouts)]
    known = {id(finding.extent) for finding in by_name}
    missing = sum(extent.nbytes for extent in rest if id(extent) not in known)
    return Search(findings + by_name, missing, folders)


def mapped(component: Component) -> Search:
    """Finds the units that are views of files already."""
    findings, rest = _by_address(component)
    return Search(findings, sum(extent.nbytes for extent in rest), [])


def _by_address(component: Component) -> tuple[list[Finding], list[Extent]]:
    """The extents whose memory is a private view of a file, and the others."""
    mappings = file_mappings()
    starts = [mapping.start for mapping in mappings]
    findings: list[Finding] = []
    rest: list[Extent] = []
    for extent in (extent for unit in component.units for extent in unit.extents):
        pointer = extent.source.data_ptr()
        mapping = mappings[position] if (position := bisect.bisect(starts, pointer) - 1) >= 0 else None
        is_view = mapping is not None and extent.nbytes and pointer + extent.nbytes <= mapping.stop
        if mapping is not None and is_view and _is_there(mapping):
            findings.append(Finding(extent, mapping.path, mapping.offset + pointer - mapping.start, mapping))
        else:
            rest.append(extent)
    return findings, rest


def _is_there(mapping: FileMapping) -> bool:
    """Whether a view's file still has its name; saving to the folder that was loaded from gives that to another one."""
    try:
        return os.stat(mapping.path).st_ino == mapping.inode
    except FileNotFoundError:
        return False
    except OSError:
        return True  # that it can't be opened is said where it is tried


def why_unreadable(found: Search) -> str | None:
    """Says which of the files can't be opened, and why; None when all can. They are closed again."""
    for path in dict.fromkeys(finding.path for finding in found.findings):
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as error:
            return f"{path} can't be opened: {error.strerror}"
    return None


def take(component: Component, found: Search) -> tuple[SourceTable, int]:
    """Makes weights views of the files they are in, where they aren't yet and where every byte is the same.

    Args:
        component (`Component`): Its units must be offloaded. Parameter objects stay what they are.
        found (`Search`): What [`search`] has found.

    Returns:
        The table of all views, and the bytes of units that are in none of the files.
    """
    table = SourceTable()
    sources: dict[str, Source] = {}
    storages: dict[str, torch.UntypedStorage] = {}
    taken: set[int] = set()
    compared = {id(f.extent): f.extent.nbytes for f in found.findings if f.mapping is None}
    with progress.bar(f"{component.name}: comparing with its files", sum(compared.values())) as advance:
        for finding in found.findings:
            if id(finding.extent) in taken:
                continue
            with contextlib.suppress(OSError, RuntimeError, LayerwiseOffloadError):
                source = sources.get(finding.path) or sources.setdefault(finding.path, Source(finding.path))
                if finding.mapping is not None:
                    done = _take_mapped(finding, finding.mapping, source, table)
                else:
                    done = _take_equal(finding, source, table, storages)
                if done:
                    taken.add(id(finding.extent))
            advance(compared.pop(id(finding.extent), 0))
    extents = [extent for unit in component.units for extent in unit.extents]
    return table, sum(extent.nbytes for extent in extents if id(extent) not in taken)


def _take_mapped(finding: Finding, mapping: FileMapping, source: Source, table: SourceTable) -> bool:
    """A view already; pages that were written to are told apart at each read."""
    device, inode = source.identity
    if inode != mapping.inode:
        return False  # another file has taken its name since
    extent = finding.extent
    if device != mapping.device and not _is_equal(extent.source, source, finding.offset):
        return False  # layered file systems name two devices for one file: then only the bytes tell
    start = extent.source.data_ptr()
    table.add(View(start, start + extent.nbytes, source, finding.offset, extent.source.untyped_storage()))
    return True


def _take_equal(
    finding: Finding, source: Source, table: SourceTable, storages: dict[str, torch.UntypedStorage]
) -> bool:
    extent = finding.extent
    (entry,) = extent.entries
    if not _is_equal(extent.source, source, finding.offset):
        return False
    if finding.path not in storages:
        # Private: a page that is written becomes this process's own, and the file stays as it is.
        storages[finding.path] = torch.UntypedStorage.from_file(finding.path, False, source.size)  # type: ignore[assignment]
    storage = storages[finding.path]
    found = os.stat(finding.path)
    if (found.st_dev, found.st_ino) != source.identity:
        return False
    with plain_tensors():
        typed = torch.empty(0, dtype=entry.host.dtype)
        place = finding.offset // entry.host.element_size()
        host = typed.set_(storage, place, entry.host.shape, entry.host.stride())
        entry.host = entry.tensor.data = host
        extent.source = raw_bytes(host, extent.nbytes)
    table.add(View(host.data_ptr(), host.data_ptr() + extent.nbytes, source, finding.offset, storage))
    return True


def _is_equal(memory: torch.Tensor, source: Source, offset: int) -> bool:
    """Whether a stretch of a file has the same bytes as memory, all of them."""
    with plain_tensors(), open(source.path, "rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        while done < memory.numel():
            chunk = bytearray(file.read(min(COMPARE_BYTES, memory.numel() - done)))
            if not chunk or not torch.equal(
                torch.frombuffer(chunk, dtype=torch.uint8), memory.narrow(0, done, len(chunk))
            ):
                return False
            done += len(chunk)
    source.check()
    return True


# ---------------------------------------------------------------------- where to look by name
class _Layouts:
    """The headers of all files in some folders, read once."""

    _cache: ClassVar[dict[tuple[str, int, int], dict[str, Stored]]] = {}

    def __init__(self, folders: list[Path]) -> None:
        self.files: list[tuple[str, dict[str, Stored]]] = []
        for folder in folders:
            for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
                with contextlib.suppress(OSError, ValueError):
                    self.files.append((str(path), self._read(path)))

    def _read(self, path: Path) -> dict[str, Stored]:
        found = path.stat()
        key = (str(path), found.st_mtime_ns, found.st_size)
        if key not in self._cache:
            if len(self._cache) > MOST_HEADERS:
                self._cache.clear()
            self._cache[key] = read_layout(path)
        return self._cache[key]


def _named(extent: Extent, layouts: _Layouts) -> Iterator[Finding]:
    """The places in files that have the name, type and shape of an extent's only tensor."""
    if len(extent.entries) != 1 or not extent.entries[0].host.is_contiguous() or not extent.nbytes:
        return  # views that share bytes stay what they are
    entry = extent.entries[0]
    for path, layout in layouts.files:
        for name in _spellings(entry.name, layout):
            stored = layout[name]
            fits = (stored.dtype, stored.shape) == (entry.host.dtype, tuple(entry.host.shape))
            if fits and stored.stop - stored.start == extent.nbytes and not stored.start % entry.host.element_size():
                yield Finding(extent, path, stored.start)


def _spellings(name: str, layout: dict[str, Stored]) -> Iterator[str]:
    """Names in a file that mean a parameter: its own, without a prefix, or with a base model's."""
    if name in layout:
        yield name
        return
    rest = name.partition(".")[2]
    while rest:
        if rest in layout:
            yield rest
        rest = rest.partition(".")[2]
    yield from (other for other in layout if other.endswith("." + name))


def checkpoint_folders(component: Component, checkpoint: str | None) -> list[Path]:
    """Where a component's files may be: what was given, else what the model remembers; its subfolder comes first."""
    names = [checkpoint] if checkpoint is not None else list(_remembered(component.module))
    found: list[Path] = []
    for name in names:
        root = Path(name)
        if not root.exists():
            cached = _cached(name)
            if cached is None:
                continue
            root = cached
        inside = root / component.name.partition(" of ")[0]
        found += [path for path in (inside, root) if path.exists() and path not in found]
    return found


def _remembered(module: nn.Module) -> Iterator[str]:
    config: Any = getattr(module, "config", None)
    for value in (
        config.get("_name_or_path") if isinstance(config, Mapping) else getattr(config, "_name_or_path", None),
        getattr(module, "name_or_path", None),
    ):
        if isinstance(value, (str, os.PathLike)) and str(value):
            yield str(value)


def _cached(name: str) -> Path | None:
    """The newest snapshot of a repository in the hub's cache."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:
        return None
    try:
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    except ValueError:
        return None  # the path of a folder that is gone is no repository's name
    with contextlib.suppress(OSError):
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None
