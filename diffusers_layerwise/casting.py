"""diffusers' layerwise casting: a hook that makes a module's weights wider before its forward, and narrow again after.

It does so by pointing `.data` at new memory, twice in each pass, with the values that were there before.
"""

from __future__ import annotations

from torch import nn

NAME = "layerwise_casting"


def casts(module: nn.Module) -> bool:
    """Whether this very module's weights are cast around its forward."""
    registry = module.__dict__.get("_diffusers_hook")
    return registry is not None and NAME in registry.hooks


def casts_inside(module: nn.Module) -> bool:
    """Whether weights of a module, or of any below it, are cast."""
    return any(casts(part) for part in module.modules())
