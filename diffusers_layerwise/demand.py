"""Groups where device memory may be short: a prefetch is put off, a group that is needed now takes what others hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .group import Group, GroupState
from .transfer import Ring


def onload_ahead(group: Group, ring: Ring | None) -> bool:
    """Starts the load of a group that isn't needed yet. Returns False when there is no memory for it now.

    It is put off until it is used, so that a device without memory isn't asked again after each group.
    """
    if group.is_put_off:
        return False
    try:
        return group.start_onload(ring)
    except torch.OutOfMemoryError:
        group.is_put_off = True
        return False


def onload_now(group: Group, groups: Iterable[Group], ring: Ring | None) -> bool:
    """Starts the load of a group that is used now, none of `groups` being in use. Returns False without a free slot.

    Where its own memory can't be had, the residents among `groups` are given up, each until it is used again; where
    that doesn't help it is streamed through the ring.

    Raises:
        torch.OutOfMemoryError: It doesn't fit the ring either.
    """
    try:
        return group.start_onload(ring)
    except torch.OutOfMemoryError:
        for other in groups:
            if other.lease is not None and not other.lease.slots:
                other.offload(ring)
    try:
        return group.start_onload(ring)
    except torch.OutOfMemoryError:
        if not group.resident or ring is None or group.size > ring.slot_bytes * ring.count:
            raise
    group.resident = False
    return group.start_onload(ring)


def any_loaded(groups: Iterable[Group]) -> bool:
    """Whether one of these is on the device or on its way."""
    return any(group.state is not GroupState.HOST for group in groups)
