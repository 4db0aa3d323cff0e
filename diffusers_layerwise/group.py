"""One group: start_onload, wait_onload, offload. All three are idempotent, and the parameter objects never change."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from .binding import Binding
from .discovery import Unit
from .errors import LayerwiseOffloadError
from .host import HostStore
from .reader import Ticket, send
from .tensors import ALIGNMENT
from .transfer import Account, Lease, Ring, Transfer


class GroupState(enum.Enum):
    """Where a group is, and what occupies memory.

    `HOST`: only the host copy exists; `.data` points at it.
    `LOADING`: device memory is lent and a copy is queued; `.data` still points at the host copy.
    `READY`: `.data` points at device memory, and the caller's stream is behind the copy. A resident group on a CPU
    execution device is ready where it lies, without a copy.
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
        self.is_put_off = False
        self.state = GroupState.HOST
        self.lease: Lease | None = None
        self._ticket: Ticket | None = None
        self._binding = Binding(self.units, store)
        self._transfer = transfer
        self._account = account

    @property
    def size(self) -> int:
        """Bytes in a region."""
        return self._binding.size

    @property
    def copy_bytes(self) -> int:
        """Bytes that one load moves."""
        return self._binding.copy_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory of its own; 0 when it lies in the ring or on the host."""
        if self.state is GroupState.HOST or (self.lease is not None and self.lease.slots):
            return 0
        return self.size + ALIGNMENT

    # ------------------------------------------------------------------ the three verbs
    def start_onload(self, ring: Ring | None) -> bool:
        """Queues the copy to the device. Returns False when the ring has no slots free for it now.

        Args:
            ring (`Ring`, *optional*): Where a streamed group gets its slots; not read for a resident one.
        """
        if self.state is not GroupState.HOST:
            return True
        binding, transfer, account = self._binding, self._transfer, self._account
        if not self.resident and ring is not None and not ring.has_room():
            return False
        if binding.is_edited():
            binding.refresh()
        if self.resident and not transfer.is_async and not (binding.is_read or binding.is_elsewhere):
            self._hold_in_place(1)
            binding.snapshot()
            self.state = GroupState.READY
            return True
        if self.resident or ring is None:
            lease: Lease | None = transfer.new_lease(binding.size, account)
        else:
            lease = ring.lease(binding.size)
            account.in_ring = True
        if lease is None:
            return False
        self.lease = lease
        self.state = GroupState.LOADING
        account.moved += binding.copy_bytes
        self._start_copies(lease)
        binding.snapshot()
        if transfer.log is not None:
            transfer.log.append(("load", self.name))
        return True

    def wait_onload(self) -> None:
        """Makes the caller's stream wait for the copy and points every parameter at the device."""
        if self.state is not GroupState.LOADING:
            return
        lease, binding, transfer = self.lease, self._binding, self._transfer
        assert lease is not None
        self._await_reader(lease)
        if binding.is_touched():
            # Edited on the host after the copy was queued: copy again behind it, on the same stream.
            self._start_copies(lease)
            binding.snapshot()
            self._await_reader(lease)
        transfer.wait(lease.ready)
        # READY first: interrupted while pointing, offload() still puts every parameter back.
        self.state = GroupState.READY
        binding.point_at(lease)
        if transfer.log is not None:
            transfer.log.append(("ready", self.name))

    def _start_copies(self, lease: Lease) -> None:
        binding = self._binding
        if binding.route is None:
            self._transfer.start_copies(binding.copies(lease), lease, self.name, binding.copy_bytes)
        else:
            # Known before it begins: interrupted in between, it would go on in memory that was given away.
            self._ticket = Ticket(self.name, binding.route, lease, self._transfer, binding.copy_bytes)
            send(self._ticket)

    def _await_reader(self, lease: Lease) -> None:
        """Where the group is read from files: waits until its copies are queued, and raises what went wrong."""
        if self._binding.route is None:
            return
        if self._ticket is None:
            self._start_copies(lease)  # it failed the last time; by now the cause may be gone
        assert self._ticket is not None
        try:
            self._ticket.wait()
        except LayerwiseOffloadError:
            self._ticket = None
            raise
        self._ticket = None

    def point_again(self) -> None:
        """Points every parameter back at its place on the device, where a module has pointed it elsewhere."""
        if self.state is GroupState.READY:
            if self.lease is not None:
                self._binding.point_at(self.lease)
            else:
                self._binding.point_home()

    def offload(self, ring: Ring | None) -> None:
        """Points every parameter back at its host copy and gives the device memory back behind the caller's stream."""
        if self.state is GroupState.HOST:
            return
        lease, used, binding = self.lease, self.state is GroupState.READY, self._binding
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        if lease is None:
            self._hold_in_place(-1)
            self.state = GroupState.HOST
            return
        if used:
            if binding.is_touched() or not lease.slots or binding.is_rearranged(lease):
                binding.keep_edits(lease)
            binding.point_home()
        self.state = GroupState.HOST
        self.lease = None
        if lease.slots:
            assert ring is not None
            ring.give_back(lease, used)
        else:
            binding.forget_views()
            self._transfer.drop_lease(lease, self._account)
        if self._transfer.log is not None:
            self._transfer.log.append(("free", self.name))

    def _hold_in_place(self, sign: int) -> None:
        """On a CPU execution device the host copy is already where it computes: counted, never copied."""
        self._transfer.hold(sign * (self._binding.size + ALIGNMENT))
        self._account.hold(sign * (self._binding.size + ALIGNMENT))

    # ------------------------------------------------------------------ edits
    def outdated(self) -> bool:
        """Whether what lies on the device, or is on its way, isn't what the module holds any more.

        Other objects, or (while `.data` should be the host copy) other memory. In-place edits are no reason: on the
        device they are kept, and a copy that was queued before one is repeated.
        """
        if self.state is GroupState.LOADING or self.lease is None:
            return self._binding.is_edited()
        return self._binding.is_replaced() or self._binding.is_repointed(self.lease)

    def is_touched(self) -> bool:
        """Whether a tensor was edited in place since it was loaded."""
        return self.state is not GroupState.HOST and self._binding.is_touched()

    def take_edits(self) -> None:
        """Copies a ready group's device memory to the host, for edits that no counter shows."""
        if self.state is GroupState.READY and self.lease is not None:
            self._binding.keep_edits(self.lease, everything=True)

    def rebuild(self) -> None:
        """After an interrupt: looks everything up again. The group must be offloaded."""
        self._binding.refresh(everything=True)

    def renew(self) -> None:
        """Takes over edits that were made while the group was on the host. Does nothing otherwise."""
        if self.state is GroupState.HOST and self._binding.is_edited():
            self._binding.refresh()

    def forget_views(self) -> None:
        """Drops kept views of device memory. The group must be offloaded."""
        self._binding.forget_views()
