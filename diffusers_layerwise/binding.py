"""A group's tensors: what to point where, and what was edited. Looked up once; the hot path only walks lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .discovery import Unit
from .errors import LayerwiseOffloadError, how_to_end
from .host import HostStore
from .parts import entries_of, pose, shells_of, twins
from .pieces import make_route
from .tensors import Entry, Extent, collect_extents, plain_data, plain_tensors, view_like
from .transfer import Copy, Lease


class Binding:
    """The entries of a run of units, bound to their host copies.

    Args:
        units (`Sequence[Unit]`): The run.
        store (`HostStore`): Where the host copy lies.

    Attributes:
        size (`int`): Bytes of the run in a region.
        copy_bytes (`int`): Bytes that one load moves: padding too when the host copy is packed.
        route (`Route`, *optional*): How it is loaded where it is read from files or through their mappings.
        is_elsewhere (`bool`): Some of it was made a view of a file, and so isn't aligned as it was when it was loaded.
        is_read (`bool`): Some of it is read past the mapping: a file that isn't to fill the page cache.
    """

    def __init__(self, units: Sequence[Unit], store: HostStore) -> None:
        self.units = units
        self.store = store
        self.bind()

    def bind(self) -> None:
        """Looks everything up again, after the units' tensors or places changed."""
        self.entries = [e for unit in self.units for extent in unit.extents for e in extent.entries]
        self._tensors = [entry.tensor for entry in self.entries]
        self._hosts = [entry.host for entry in self.entries]
        self._watch = [(entry.reader(), entry.tensor, entry.host.data_ptr()) for entry in self.entries]
        outer = {id(entry.outer): entry for entry in self.entries if entry.outer is not None}
        self._outers = [entry.outer for entry in outer.values() if entry.outer is not None]
        self._watch_outer = [(_outer_reader(entry), entry.outer) for entry in outer.values()]
        self._versions = self._read_versions()
        self._shells = [shell for entry in outer.values() for shell in shells_of(entry.outer)]
        self._homes = twins(self._shells, {id(e.tensor): e.tensor for e in self.entries}) if self._shells else []
        pose(self._shells, self._homes)
        self.size = sum(unit.size for unit in self.units)
        self._source = self._contiguous()
        extents = [extent for unit in self.units for extent in unit.extents]
        self.copy_bytes = sum(e.nbytes for e in extents) if self._source is None else self.size
        self.route = make_route(self.units, self.store)
        self.is_read = self.route is not None and self.route.is_direct
        self.is_elsewhere = any(not e.is_as_loaded() and self._is_view(e) for e in extents)
        self.forget_views()

    def _is_view(self, extent: Extent) -> bool:
        table = self.store.table
        return table is not None and table.locate(extent.source.data_ptr(), extent.nbytes) is not None

    def forget_views(self) -> None:
        """Drops the kept views of device memory; they would keep a closed ring's memory alive."""
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._twins: dict[tuple[int, int], list[Any]] = {}
        self._copies: dict[tuple[int, int], list[Copy]] = {}

    # ------------------------------------------------------------------ pointing
    def point_at(self, lease: Lease) -> None:
        """Points every tensor at the device memory that a lease lends."""
        for tensor, view in zip(self._tensors, self.views(lease), strict=True):
            tensor.data = view
        if self._shells:
            pose(self._shells, self._twins_on(lease))

    def point_home(self) -> None:
        """Points every tensor back at its host copy."""
        for tensor, host in zip(self._tensors, self._hosts, strict=True):
            tensor.data = host
        if self._shells:
            pose(self._shells, self._homes)

    def _twins_on(self, lease: Lease) -> list[Any]:
        """What the shells of quantised parameters look like on the device. Kept as the views are."""
        if lease.key not in self._twins:
            views = self.views(lease)
            self._twins[lease.key] = twins(
                self._shells, {id(t): view for t, view in zip(self._tensors, views, strict=True)}
            )
        return self._twins[lease.key]

    def views(self, lease: Lease) -> list[torch.Tensor]:
        """The tensors' views of device memory. Kept per address, so that steady state makes none."""
        found = self._views.get(lease.key)
        if found is None:
            with plain_tensors():
                found, offset = [], lease.offset
                for unit in self.units:
                    for extent in unit.extents:
                        start = offset + extent.shift(self.store.device)
                        for entry, inner in zip(extent.entries, extent.offsets, strict=True):
                            found.append(view_like(lease.buffer, start + inner, entry.host))
                        offset += extent.size
            self._views[lease.key] = found
        return found

    def copies(self, lease: Lease) -> list[Copy]:
        """What to copy to fill a lease: one pair when the host copy is packed, else one for each extent."""
        found = self._copies.get(lease.key)
        if found is None:
            with plain_tensors():
                found = self._make_copies(lease)
            self._copies[lease.key] = found
        return found

    def _make_copies(self, lease: Lease) -> list[Copy]:
        if self._source is not None:
            return [(lease.buffer.narrow(0, lease.offset, self.size), self._source)]
        copies, offset = [], lease.offset
        for unit in self.units:
            for extent in unit.extents:
                start = offset + extent.shift(self.store.device)
                copies.append((lease.buffer.narrow(0, start, extent.nbytes), extent.source))
                offset += extent.size
        return copies

    def _contiguous(self) -> torch.Tensor | None:
        places = [self.store.place(unit) for unit in self.units]
        first = places[0] if places else None
        if first is None:
            return None
        end = first.offset
        for place in places:
            if place is None or place.chunk is not first.chunk or place.offset != end:
                return None
            end += place.size
        with plain_tensors():
            return first.chunk.buffer.narrow(0, first.offset, self.size)

    # ------------------------------------------------------------------ edits
    def snapshot(self) -> None:
        """Remembers the tensors' version counters: what is copied now is of these versions."""
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int]:
        """The tensors' version counters, then those of the shells: an edit of a shell leaves its inner ones alone."""
        versions = [tensor._version for tensor in self._tensors]
        if self._watch_outer:
            versions += [outer._version for outer in self._outers if not outer.is_inference()]
        return versions

    def is_touched(self) -> bool:
        """Whether a tensor was edited in place since the snapshot."""
        return self._read_versions() != self._versions

    def _is_outer_touched(self) -> bool:
        count = len(self._tensors)
        return bool(self._watch_outer) and self._read_versions()[count:] != self._versions[count:]

    def is_replaced(self) -> bool:
        """Whether the module holds another object than the one that is bound."""
        return any(read() is not tensor for read, tensor, _ in self._watch) or self._is_outer_replaced()

    def _is_outer_replaced(self) -> bool:
        return any(read() is not outer for read, outer in self._watch_outer)

    def is_edited(self) -> bool:
        """Whether a tensor that should be on the host was replaced, or points at other memory than its host copy."""
        for read, tensor, pointer in self._watch:
            if read() is not tensor or tensor.data_ptr() != pointer:
                return True
        return self._is_outer_replaced()

    def is_rearranged(self, lease: Lease) -> bool:
        """Whether a quantised layer has put other tensors in the place of its own while it ran.

        bitsandbytes does, in a layer's first forward. Always False where all parameters are ordinary ones.
        """
        return bool(self._watch_outer) and (self.is_replaced() or self.is_repointed(lease))

    def is_repointed(self, lease: Lease) -> bool:
        """Whether a tensor on the device was pointed at other memory."""
        views = self.views(lease)
        return any(t.data_ptr() != v.data_ptr() for t, v in zip(self._tensors, views, strict=True))

    def keep_edits(self, lease: Lease, everything: bool = False) -> None:
        """Takes over what was written to tensors, or what they were pointed at, while on the device.

        With `everything` also what no version counter shows (edits through `.data`).

        The only device-to-host copies of weights there are.
        """
        moved: set[int] = set()
        is_outer_touched = self._is_outer_touched()
        for position, (entry, view) in enumerate(zip(self.entries, self.views(lease), strict=True)):
            tensor = entry.tensor
            is_moved = tensor.data_ptr() != view.data_ptr()
            is_edited = tensor._version != self._versions[position] or (is_outer_touched and entry.outer is not None)
            if not (is_edited or is_moved or everything):
                continue
            with plain_tensors():
                new = plain_data(tensor)
                if new.shape == entry.host.shape and new.dtype == entry.host.dtype:
                    entry.host.copy_(new)
                else:
                    tensor.data = new.to("cpu", copy=True)
                    moved.add(id(entry))
        if moved or self.is_replaced():
            for entry in self.entries:
                # First: what stays is read from the host again, not from memory that is about to be given back.
                if id(entry) not in moved:
                    entry.tensor.data = entry.host
            self.refresh()

    def _move_out(self, unit: Unit) -> None:
        """The unit's packed memory is given up: what wasn't changed of it gets memory of its own."""
        if self.store.place(unit) is None:
            return
        for extent in unit.extents:
            # Views of one range keep what they share, and with it the chunk.
            for entry in extent.entries if len(extent.entries) == 1 else []:
                if _unchanged(entry):
                    entry.tensor.data = _copied(entry.host)

    def refresh(self, everything: bool = False) -> None:
        """Reads the module's tensors anew: new objects, new memory. They must be off the device.

        Args:
            everything (`bool`): Also those that seem unchanged: packing them was cut short.
        """
        for unit in self.units:
            entries = [entry for extent in unit.extents for entry in extent.entries]
            changed = not all(_unchanged(entry) and _outer_reader(entry)() is entry.held for entry in entries)
            if not changed and not everything:
                continue
            if changed:
                self._move_out(unit)
                self.store.has_gaps |= unit.index >= 0 and self.store.place(unit) is not None
                self.store.forget(unit)
            unit.extents = collect_extents(_reread(entries))
        self.bind()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with plain_tensors():
        return tensor.clone(memory_format=torch.preserve_format)


def _unchanged(entry: Entry) -> bool:
    return entry.current() is entry.tensor and entry.tensor.data_ptr() == entry.host.data_ptr()


def _outer_reader(entry: Entry) -> Callable[[], Any]:
    module, name = entry.owners[0]
    held: dict[str, Any] = module._buffers if entry.is_buffer else module._parameters
    return functools.partial(held.get, name)


def _reread(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of what is held now in the place of these; what is on a device goes to the host."""
    found: list[Entry] = []
    before = {(id(entry.tensor), entry.host.data_ptr()) for entry in entries if entry.on_disk}
    for held in {id(entry.held): entry for entry in entries}.values():
        tensor = _outer_reader(held)()
        if tensor is None:
            continue
        name = held.name.removesuffix(held.path)
        fresh, reason = entries_of(tensor, held.owners, name, held.is_buffer)
        if reason is not None:
            raise LayerwiseOffloadError(
                f"{name} was replaced and now {reason}, which can't be streamed. Take layerwise offload off before "
                f"such a change ({how_to_end(False)}, or {how_to_end(True)}) and enable it after it."
            )
        for entry in fresh:
            if entry.host.device.type != "cpu":
                with plain_tensors():
                    entry.tensor.data = entry.host.to("cpu")
                    entry.host = plain_data(entry.tensor)
            entry.on_disk = (id(entry.tensor), entry.host.data_ptr()) in before
            found.append(entry)
    return list({id(entry.tensor): entry for entry in found}.values())
