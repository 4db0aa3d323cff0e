"""A component's forward that may have to be repeated: whether it may, and what has to be as it was before."""

from __future__ import annotations

import enum
import traceback
from typing import Any

import torch
from torch import nn

from . import platform
from .ranks import has_peers

#: Arguments that can't be changed in place.
_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
)


class Snapshot:
    """What a call's arguments hold: containers and their items, tensors and their version counters.

    A forward that fails may have filled a cache in place (`feat_cache`, `kv_cache`) or changed its input; repeated, it
    would go on from there. What can't be looked into counts as changed.
    """

    def __init__(self, value: Any) -> None:
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self._items: list[tuple[Any, tuple[Any, ...]]] = []
        self._is_known = True
        self._look(value)

    def _look(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # One made under inference mode has no version counter.
            self._is_known = self._is_known and not value.is_inference()
            if self._is_known:
                self._tensors.append((value, value._version))
        elif isinstance(value, (dict, list, tuple)):
            items = _items(value)
            self._items.append((value, items))
            for item in items:
                self._look(item)
        elif not isinstance(value, _CONSTANT):
            self._is_known = False

    def is_unchanged(self) -> bool:
        """Whether everything is as it was."""
        return (
            self._is_known
            and all(tensor._version == version for tensor, version in self._tensors)
            and all(_same(_items(container), items) for container, items in self._items)
        )


def _items(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return tuple(container)


def _same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


class Attempt:
    """One forward, before it begins.

    Args:
        module (`nn.Module`): The component.
        device (`torch.device`): The execution device.
        arguments (`Any`): What it is called with.
    """

    def __init__(self, module: nn.Module, device: torch.device, arguments: Any) -> None:
        self.module = module
        self.device = device
        self._arguments = Snapshot(arguments)
        self._random = torch.get_rng_state()
        self._device_random = platform.rng_state(device)

    def is_repeatable(self) -> bool:
        """Whether the forward, cut short, would give the same result if it were called again.

        Not in training (a running mean may have moved), nor with hooks of diffusers', which may count steps and keep
        what an earlier one computed, nor beside other ranks: they would wait for what is exchanged once, not twice.
        """
        return (
            not self.module.training
            and not has_peers()
            and self._arguments.is_unchanged()
            and not any("_diffusers_hook" in vars(part) for part in self.module.modules())
        )

    def rewind(self) -> None:
        """Puts the random states back."""
        torch.set_rng_state(self._random)
        platform.set_rng_state(self.device, self._device_random)


def let_go(error: BaseException | None) -> None:
    """Drops the local variables of a failed forward: they hold its activations for as long as its error is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
