"""Values of small tensors on a device without memory: a real host copy for each storage whose content is known.

Timesteps, token ids, masks and schedulers' tables are small and come from the host, so `.item()`, comparisons and
data-dependent shapes are exact; what comes out of a model has no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .live import LiveBytes

#: Elements up to which a tensor's value is kept.
SMALL = 1 << 16

aten = torch.ops.aten

FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.eye.m,
    aten.full.default,
    aten.linspace.default,
    aten.logspace.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.zeros.default,
}
"""Operations whose result is known from their arguments."""


class Twins:
    """Host storages that mirror those of tensors on the fake device.

    Args:
        live (`LiveBytes`): Knows when a storage ends.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._values = live.values

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The host tensor with a fake tensor's content, sharing memory with those of its views; None if unknown."""
        if not tensor.is_meta:
            return tensor
        storage = self._values.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        twin = torch.empty(0, dtype=tensor.dtype)
        found: torch.Tensor = twin.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return found

    def keep(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Notes a fake tensor's content, where it is small and fills its storage."""
        storage = tensor.untyped_storage()
        if tensor.numel() > SMALL or storage.nbytes() > SMALL * 8:
            return
        twin = torch.empty(storage.nbytes(), dtype=torch.uint8)
        self._values[storage._cdata] = twin.untyped_storage()
        mirrored = self.of(tensor)
        if mirrored is not None:
            mirrored.copy_(value)

    def forget(self, tensor: torch.Tensor) -> None:
        """A fake tensor got a content that nobody knows."""
        self._values.pop(tensor.untyped_storage()._cdata, None)

    def known(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the content of all these is known, and computing with it is cheap."""
        count = 0
        for tensor in tensors:
            count += tensor.numel()
            if count > SMALL or (tensor.is_meta and tensor.untyped_storage()._cdata not in self._values):
                return False
        return True


def mapped(values: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments with every tensor changed, through lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, (list, tuple)):
        return type(values)([mapped(v, change) for v in values])
    if isinstance(values, dict):
        return {k: mapped(v, change) for k, v in values.items()}
    return values


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """All tensors in arguments, through lists, tuples and dicts."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found
