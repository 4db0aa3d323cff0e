"""One group: start_onload, wait_onload, offload. All three are idempotent, and the parameter objects never change."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import torch

from .discovery import Unit
from .errors import LayerwiseOffloadError
from .host import HostStore
from .tensors import ALIGNMENT, Entry, collect_extents, view_like, why_not_movable
from .transfer import Account, Copy, Lease, Ring, Transfer, plain_tensors


class GroupState(enum.Enum):
    """Where a group is, and what occupies memory.

    `HOST`: only the host copy exists; `.data` points at it.
    `LOADING`: device memory is lent and a copy is queued; `.data` still points at the host copy.
    `READY`: `.data` points at device memory, and the caller's stream is behind the copy.
    """

    HOST = "host"
    LOADING = "loading"
    READY = "ready"


class Group:
    """The parameters that move together: a run of units in execution order.

    Args:
        name (`str`): For people: the first unit's name, and the last one's if there are several.
        units (`Sequence[Unit]`): The run.
        store (`HostStore`): Where their host copy lies.
        transfer (`Transfer`): The device.
        account (`Account`): The component's counters.
        resident (`bool`): Has device memory of its own while its component is in use.
    """

    def __init__(
        self,
        name: str,
        units: Sequence[Unit],
        store: HostStore,
        transfer: Transfer,
        account: Account,
        resident: bool = False,
    ) -> None:
        self.name = name
        self.units = list(units)
        self.resident = resident
        self.state = GroupState.HOST
        self.size = sum(unit.size for unit in units)
        self.lease: Lease | None = None
        self._store = store
        self._transfer = transfer
        self._account = account
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._entries: list[Entry] = []
        self._watch: list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor, int]] = []
        self._source: torch.Tensor | None = None
        self._bind()

    def _bind(self) -> None:
        """Looks up what the hot path needs: entries, what to watch for edits, and the one contiguous source."""
        self._entries = [e for unit in self.units for extent in unit.extents for e in extent.entries]
        self._watch = []
        for entry in self._entries:
            module, name = entry.owners[0]
            held: Mapping[str, torch.Tensor | None] = module._buffers if entry.is_buffer else module._parameters
            self._watch.append((held, name, entry.tensor, entry.host.data_ptr()))
        self._views.clear()
        self._source = self._contiguous()

    def _contiguous(self) -> torch.Tensor | None:
        places = [self._store.place(unit) for unit in self.units]
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

    # ------------------------------------------------------------------ the three verbs
    def start_onload(self, ring: Ring | None) -> bool:
        """Queues the copy to the device. Returns False when the ring has no slots free for it now.

        Args:
            ring (`Ring`, *optional*): Where a streamed group gets its slots; not read for a resident one.
        """
        if self.state is not GroupState.HOST:
            return True
        self.renew()
        if self.resident and not self._transfer.is_async:
            # On a CPU execution device the host copy is already where it computes: counted, never copied.
            self._transfer.hold(self.size + ALIGNMENT)
            self._account.hold(self.size + ALIGNMENT)
            self._snapshot()
            self.state = GroupState.READY
            return True
        if self.resident or ring is None:
            lease: Lease | None = self._transfer.new_lease(self.size, self._account)
        else:
            lease = ring.lease(self.size)
            self._account.in_ring = True
        if lease is None:
            return False
        self.lease = lease
        self.state = GroupState.LOADING
        self._account.moved += self.size
        self._transfer.start_copies(self._copies(lease), lease, self.name)
        self._snapshot()
        self._transfer.note("load", self.name)
        return True

    def wait_onload(self) -> None:
        """Makes the caller's stream wait for the copy and points every parameter at the device."""
        if self.state is not GroupState.LOADING:
            return
        assert self.lease is not None
        if any(entry.tensor._version != entry.version for entry in self._entries):
            # Edited on the host after the copy was queued: copy again behind it, on the same stream.
            self._transfer.start_copies(self._copies(self.lease), self.lease, self.name)
            self._snapshot()
        self._transfer.wait(self.lease.ready)
        # READY first: interrupted in the loop, offload() still puts every parameter back.
        self.state = GroupState.READY
        for entry, view in zip(self._entries, self._views_of(self.lease), strict=True):
            entry.tensor.data = view
        self._transfer.note("ready", self.name)

    def offload(self, ring: Ring | None) -> None:
        """Points every parameter back at its host copy and gives the device memory back behind the caller's stream."""
        if self.state is GroupState.HOST:
            return
        lease, used = self.lease, self.state is GroupState.READY
        if lease is None:
            self._transfer.hold(-self.size - ALIGNMENT)
            self._account.hold(-self.size - ALIGNMENT)
            self.state = GroupState.HOST
            return
        if used:
            self._leave(lease)
        self.state = GroupState.HOST
        self.lease = None
        if lease.slots:
            assert ring is not None
            ring.give_back(lease, used)
        else:
            self._views.pop(lease.key, None)
            self._transfer.drop_lease(lease, self._account)
        self._transfer.note("free", self.name)

    # ------------------------------------------------------------------ edits
    def _leave(self, lease: Lease) -> None:
        views = self._views_of(lease)
        for entry, view in zip(self._entries, views, strict=True):
            tensor = entry.tensor
            if tensor._version != entry.version or (not lease.slots and tensor.data_ptr() != view.data_ptr()):
                self._keep_edit(entry)
            tensor.data = entry.host

    def _keep_edit(self, entry: Entry) -> None:
        """Keeps what was written to a parameter while it was on the device. The only device-to-host copy there is."""
        with plain_tensors():
            new = entry.tensor.data
            if new.shape == entry.host.shape and new.dtype == entry.host.dtype:
                entry.host.copy_(new)
            else:
                entry.host = new.to("cpu")
        entry.version = entry.tensor._version

    def _edited(self) -> bool:
        """Whether a parameter was replaced, or pointed at other memory, since the group was bound."""
        for held, name, tensor, pointer in self._watch:
            if held.get(name) is not tensor or tensor.data_ptr() != pointer:
                return True
        return False

    def outdated(self) -> bool:
        """Whether what lies on the device, or is on its way, isn't what the module holds any more.

        Other objects, or (while `.data` should be the host copy) other memory. In-place edits are no reason: on the
        device they are kept, and a copy that was queued before one is repeated.
        """
        if self.state is GroupState.LOADING:
            return self._edited()
        return any(held.get(name) is not tensor for held, name, tensor, _ in self._watch)

    def renew(self) -> None:
        """Takes over edits that were made while the group was on the host. Does nothing otherwise."""
        if self.state is GroupState.HOST and self._edited():
            self.refresh()

    def refresh(self) -> None:
        """Reads the module's tensors anew after an edit: new objects, new memory. The group must be offloaded."""
        for unit in self.units:
            entries = [entry for extent in unit.extents for entry in extent.entries]
            if all(_unchanged(entry) for entry in entries):
                continue
            self._store.forget(unit)
            kept = [fresh for entry in entries if (fresh := _reread(entry)) is not None]
            unit.extents = collect_extents(kept)
        self.size = sum(unit.size for unit in self.units)
        self._bind()

    # ------------------------------------------------------------------ details
    def _snapshot(self) -> None:
        for entry in self._entries:
            entry.version = entry.tensor._version

    def _copies(self, lease: Lease) -> list[Copy]:
        with plain_tensors():
            if self._source is not None:
                return [(lease.buffer.narrow(0, lease.offset, self.size), self._source)]
            copies, offset = [], lease.offset
            for unit in self.units:
                for extent in unit.extents:
                    copies.append((lease.buffer.narrow(0, offset, extent.nbytes), extent.source))
                    offset += extent.size
            return copies

    def _views_of(self, lease: Lease) -> list[torch.Tensor]:
        """The parameters' views of device memory. Kept per address, so that steady state makes none."""
        views = self._views.get(lease.key)
        if views is None:
            with plain_tensors():
                views, offset = [], lease.offset
                for unit in self.units:
                    for extent in unit.extents:
                        for entry, inner in zip(extent.entries, extent.offsets, strict=True):
                            views.append(view_like(lease.buffer, offset + inner, entry.host))
                        offset += extent.size
            self._views[lease.key] = views
        return views

    def forget_views(self) -> None:
        """Drops the kept views; they would keep a closed ring's memory alive."""
        self._views.clear()


def _unchanged(entry: Entry) -> bool:
    return entry.current() is entry.tensor and entry.tensor.data_ptr() == entry.host.data_ptr()


def _reread(entry: Entry) -> Entry | None:
    tensor = entry.current()
    if tensor is None:
        return None
    reason = why_not_movable(tensor)
    if reason is not None:
        raise LayerwiseOffloadError(
            f"{entry.name} was replaced and now {reason}, which can't be streamed. Call "
            f"disable_layerwise_offload() before such a change and enable_layerwise_offload() after it."
        )
    with plain_tensors():
        if tensor.device.type != "cpu":
            tensor.data = tensor.data.to("cpu")
        host = tensor.data
    return Entry(tensor, entry.owners, entry.name, host, tensor._version, entry.is_buffer)
