"""Processes that work on one model: what wraps a component for them, and which device a weight's mesh is of.

Classes are told by name: `torch.distributed` and its wrappers are large to import, and may be left out of a build.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .errors import LayerwiseOffloadError

#: Wrappers that move or gather weights themselves, by class name, and what they are called.
_SHARDERS = {"FSDPModule": "fully_shard() (FSDP2)", "FullyShardedDataParallel": "FullyShardedDataParallel (FSDP1)"}
_REPLICATORS = {"DistributedDataParallel": "DistributedDataParallel", "DataParallel": "nn.DataParallel"}


_seen: weakref.WeakKeyDictionary[type[nn.Module], str] = weakref.WeakKeyDictionary()


def _wrapper(part: nn.Module) -> str:
    """The wrapper that a module is an instance of; empty for an ordinary one."""
    kind = type(part)
    found = _seen.get(kind)
    if found is None:
        names = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.")]
        found = next((name for name in names if name in _SHARDERS or name in _REPLICATORS), "")
        _seen[kind] = found
    return found


def is_initialized() -> bool:
    """Whether this process is in a group of ranks; there may be one only."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def has_peers() -> bool:
    """Whether other ranks may wait for what this process computes: a forward must then run as often as theirs."""
    return is_initialized() and torch.distributed.get_world_size() > 1


def is_sharded_by_itself(module: nn.Module) -> bool:
    """Whether a module's weights are kept in shards by FSDP, which gathers them for each use and moves them itself."""
    return any(_wrapper(part) in _SHARDERS for part in module.modules()) or _outer_sharder(module) is not None


def _outer_sharder(module: nn.Module) -> nn.Module | None:
    """The module under FSDP that this one is a part of, and whose shards it therefore is."""
    states = sys.modules.get("torch.distributed._composable_state")
    sharded: list[nn.Module] = list(getattr(states, "_module_state_mapping", ()))
    for outer in sharded:
        if outer is not module and _wrapper(outer) in _SHARDERS and any(part is module for part in outer.modules()):
            return outer
    return None


def refuse_wrapped(name: str, module: nn.Module, parts: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises where a component is wrapped for several ranks or devices such that its weights can't stream.

    Args:
        name (`str`): The component.
        module (`nn.Module`): Its module.
        parts (`Iterable`): All modules in it with their paths, as `named_modules()` gives them.

    Raises:
        LayerwiseOffloadError: FSDP puts gathered weights in the place of its shards for each use; data parallel
            wrappers keep weights in buckets and copies for training.
    """
    for path, part in parts:
        wrapper = _wrapper(part)
        where = f"{name}.{path}" if path else name
        if wrapper in _SHARDERS:
            raise _sharded(name, f"{where} is under {_SHARDERS[wrapper]}")
        if wrapper:
            raise LayerwiseOffloadError(
                f"{name!r} can't be streamed: {where} is wrapped in {_REPLICATORS[wrapper]}, which is made for "
                f"training and keeps hold of all weights. Use the module inside it ({where}.module)."
            )
    outer = _outer_sharder(module)
    if outer is not None:
        raise _sharded(name, f"it is a part of a {type(outer).__name__}, which is under {_SHARDERS[_wrapper(outer)]}")


def _sharded(name: str, what: str) -> LayerwiseOffloadError:
    return LayerwiseOffloadError(
        f"{name!r} can't be streamed: {what}. That puts gathered weights in the place of its shards while it runs. It "
        f"can keep these on the host by itself, with fully_shard(..., offload_policy=CPUOffloadPolicy()): leave "
        f"{name!r} out then, as in components=['all', '!{name}']. To stream it, load it anew without FSDP."
    )


def refuse_meshes(name: str, weights: Iterable[tuple[str, Any]], device: torch.device) -> None:
    """Raises where a weight is a part of a tensor on a mesh of another kind of device than the one that computes.

    Args:
        name (`str`): The component.
        weights (`Iterable`): Its parameters and buffers by name.
        device (`torch.device`): The execution device.

    Raises:
        LayerwiseOffloadError: Inputs would go to the mesh's device, and the weight to another one.
    """
    for path, weight in weights:
        mesh = getattr(weight, "device_mesh", None)
        kind = getattr(mesh, "device_type", None)
        if isinstance(kind, str) and kind != device.type:
            raise LayerwiseOffloadError(
                f"{name!r} can't be streamed to {device}: {path} is a shard on a mesh of {kind!r} devices, where its "
                f"inputs would go. Parallelise it on init_device_mesh({device.type!r}, ...), or pass "
                f"onload_device={kind!r}."
            )
