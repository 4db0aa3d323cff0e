"""Layers that an adapter wraps (LoRA and its relatives, by PEFT): found by their attributes, not by their classes."""

from __future__ import annotations

from torch import nn


def is_tuner(module: nn.Module) -> bool:
    """Whether a module is an ordinary layer with adapters around it."""
    return "base_layer" in module._modules and hasattr(type(module), "adapter_layer_names")


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
