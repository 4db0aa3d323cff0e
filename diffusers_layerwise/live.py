"""Bytes of tensors that are alive on a device without memory, as an allocator would count them."""

from __future__ import annotations

import weakref

import torch

#: Torch's CUDA caching allocator hands out multiples of 512 bytes (`kMinBlockSize`).
BLOCK = 512


def rounded(count: int) -> int:
    """A byte count as the allocator rounds it."""
    return -(-count // BLOCK) * BLOCK


class LiveBytes:
    """Follows the storages of tensors on one device from their first sight to their end.

    `now` are the bytes alive; [`take_high`] gives the most since it was last asked.
    """

    def __init__(self) -> None:
        self.now = 0
        self._high = 0
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._owned: dict[int, torch.UntypedStorage] = {}
        self.values: dict[int, torch.UntypedStorage] = {}

    def see(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage, once; weights are not counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._owned:
            return
        self._sizes[key] = size = rounded(storage.nbytes())
        self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.now += size
        self._high = max(self._high, self.now)

    def own(self, tensor: torch.Tensor) -> None:
        """Takes a tensor for a weight: it is kept alive and not counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._refs.pop(key, None)
        self.now -= self._sizes.pop(key, 0)
        self._owned[key] = storage

    def take_high(self) -> int:
        """The most bytes alive at one time since the last call."""
        high, self._high = self._high, self.now
        return high

    def _forget(self, key: int) -> None:
        self._refs.pop(key, None)
        self.now -= self._sizes.pop(key, 0)
        self.values.pop(key, None)
