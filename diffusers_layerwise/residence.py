"""Where a component's weights live by its device map: what discovery has to know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn


@dataclasses.dataclass(frozen=True, eq=False)
class Home:
    """One tensor: the object that holds its values, and where it lives.

    `tensor` is what the module holds, or (for a weight that accelerate keeps elsewhere and shows as a meta tensor) what
    it will hold once it is taken over. `on_disk`: its memory is a view of a file.
    """

    tensor: torch.Tensor
    device: torch.device
    on_disk: bool = False


class Residence:
    """The homes of a module's tensors, as seen from the execution device.

    Args:
        homes (`dict[int, Home]`): By `id` of the tensor that the module holds, before and after it is taken over.
        device (`torch.device`): The execution device.
    """

    def __init__(self, homes: dict[int, Home], device: torch.device) -> None:
        self.homes = homes
        self.device = device

    def of(self, tensor: torch.Tensor) -> Home:
        """A tensor's home; the host for one that was put there since the map was read."""
        return self.homes.get(id(tensor)) or Home(tensor, torch.device("cpu"))

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stays on a further accelerator, where accelerate runs its module."""
        home = self.of(tensor).device
        return home.type != "cpu" and home != self.device

    def is_resident(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is mapped to the execution device."""
        home = self.of(tensor)
        return home.device == self.device and not home.on_disk

    def elsewhere(self, module: nn.Module) -> Iterator[tuple[str, torch.device]]:
        """The names of the parameters and buffers that stay on further accelerators, and where that is."""
        for name, tensor in named_tensors(module):
            if self.is_elsewhere(tensor):
                yield name, self.of(tensor).device


def named_tensors(module: nn.Module, persistent: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, tied ones under each of their names.

    Args:
        module (`nn.Module`): The module.
        persistent (`bool`): Only those that a state dict has.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        left_out = owner._non_persistent_buffers_set if persistent else set()
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and name not in left_out:
                yield f"{path}.{name}" if path else name, tensor
