"""Notices modules and parameters that are put into a component later: an adapter, a fused projection, a swapped block.

torch tells every registration (`module.child = ...`, `add_module`, `ModuleList.append`, `register_parameter`) to global
hooks. One of ours is there while something is watched; it only marks the component, which is looked through anew
before its next pass. Buffers aren't watched: some models assign them anew in every forward.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as registration


class Watcher(Protocol):
    """Whoever wants to know: its mark is set when the structure below a watched module has changed."""

    is_stale: bool


_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_handles: list[Any] = []


def watch(root: nn.Module, watcher: Watcher) -> None:
    """Marks `watcher` stale from now on when something is registered at `root` or below. Idempotent."""
    for module in root.modules():
        _watched.setdefault(module, weakref.WeakSet()).add(watcher)
    if not _handles:
        _handles.append(registration.register_module_module_registration_hook(_on_registration))
        _handles.append(registration.register_module_parameter_registration_hook(_on_registration))


def unwatch(watcher: Watcher) -> list[nn.Module]:
    """Undoes [`watch`]. Idempotent; the global hooks go with the last watcher. Returns the modules it watched."""
    found: list[nn.Module] = []
    for module in list(_watched):
        watchers = _watched[module]
        if watcher in watchers:
            found.append(module)
            watchers.discard(watcher)
        if not watchers:
            del _watched[module]
    if not _watched:
        while _handles:
            _handles.pop().remove()
    return found


def touch(module: nn.Module) -> None:
    """Tells whoever watches a module that it has changed in a way that torch doesn't tell."""
    for watcher in list(_watched.get(module, ())):
        watcher.is_stale = True


def _on_registration(module: nn.Module, name: str, value: object) -> None:
    # A registration of what is there already (the same object again) changes nothing.
    if module in _watched and module._modules.get(name, module._parameters.get(name)) is not value:
        touch(module)
