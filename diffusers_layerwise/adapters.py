"""Layers that an adapter wraps (LoRA and its relatives, by PEFT): found by their attributes, not by their classes."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Worn(Protocol):
    """A component as this module sees it, by its schedule."""

    component: Any
    is_stale: bool
    transfer: Any

    def leave(self) -> None:
        """Everything of it goes to the host."""


def is_tuner(module: nn.Module) -> bool:
    """Whether a module is an ordinary layer with adapters around it."""
    return "base_layer" in module._modules and hasattr(type(module), "adapter_layer_names")


def tuners(module: nn.Module) -> tuple[nn.Module, ...]:
    """All layers of a module that adapters wrap."""
    return tuple(part for part in module.modules() if is_tuner(part))


def unfuse_switched_off(worn: Worn) -> None:
    """Before a pass: takes adapters that are fused and switched off out of the weights of their layers. Idempotent.

    PEFT does it in the layer's forward, in place: on a streamed copy, which is then forgotten, while the layer would
    say that it is done.
    """
    parts = tuners(worn.component.module) if worn.is_stale else worn.component.tuners
    due = [part for part in parts if getattr(part, "disable_adapters", False) and getattr(part, "merged", False)]
    if due:
        worn.leave()
        worn.transfer.finish()
        for part in due:
            part.unmerge()  # type: ignore[operator]


def adapter_modules(module: nn.Module) -> set[int]:
    """Ids of all modules below one that hold weights of adapters, and not those of the layers that they adapt."""
    found: set[int] = set()
    for part in module.modules():
        if is_tuner(part):
            layer = part._modules["base_layer"]
            inside = {id(each) for each in part.modules()} - {id(part)}
            below = {id(each) for each in layer.modules()} if layer is not None else set()
            found |= inside - below  # a layer may be wrapped twice: what the inner wrapper adds is an adapter's too
    return found
