"""diffusers' hooks (`HookRegistry`) beside ours on one module: theirs run inside ours, whichever came first.

Both wrap `forward`. What a hook of diffusers' does to weights (layerwise casting) or inputs must find them loaded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from . import patches
from .casting import NAME
from .hooks import is_guarded, own_schedule
from .watch import touch


def register(original: Callable[..., Any], registry: Any, hook: Any, name: str) -> None:
    """`HookRegistry.register_hook()`: weights are on the host while the hook is put on, below ours."""
    module = registry._module_ref
    schedule = own_schedule(module)
    if schedule is not None and name == NAME and not schedule.is_open:
        # It casts at once, and must find the host copy: whatever is loaded is given up.
        schedule.leave()
        schedule.transfer.finish()
    with _below_ours(module):
        original(hook, name)
    if name == NAME:
        touch(module)


def remove(original: Callable[..., Any], registry: Any, *args: Any, **kwargs: Any) -> None:
    """`HookRegistry.remove_hook()`: it restores the `forward` that it found, which is to be the one below ours."""
    with _below_ours(registry._module_ref):
        original(*args, **kwargs)


@contextlib.contextmanager
def _below_ours(module: nn.Module) -> Iterator[None]:
    held = module.__dict__
    ours = held.get("forward")
    if own_schedule(module) is None or not _is_accelerates(ours):
        yield
        return
    held["forward"] = held["_old_forward"]
    try:
        yield
    finally:
        # accelerate's wrapper looks this up in each call.
        held["_old_forward"], held["forward"] = held["forward"], ours


def _is_accelerates(forward: object) -> bool:
    if isinstance(forward, functools.partial):
        return getattr(forward.func, "__module__", None) == "accelerate.hooks"
    return is_guarded(forward)


def wrap_registry() -> None:
    """Puts the wrappers on diffusers' `HookRegistry`. Idempotent; inert for modules without our hooks."""
    with contextlib.suppress(ImportError):
        from diffusers.hooks import HookRegistry

        patches.wrap_method(HookRegistry, "register_hook", register)
        patches.wrap_method(HookRegistry, "remove_hook", remove)
