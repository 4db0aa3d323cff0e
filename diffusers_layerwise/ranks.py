"""Processes that work on one model: what wraps a component for them, and which device a weight's mesh is of.

Classes are told by name: `torch.distributed` and its wrappers are large to import, and may be left out of a build.
"""

from __future__ import annotations

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
    return any(_wrapper(part) in _SHARDERS for part in module.modules())


def refuse_wrapped(name: str, parts: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises where a component is wrapped for several ranks or devices such that its weights can't stream.

    Args:
        name (`str`): The component.
        parts (`Iterable`): Its modules with their paths, as `named_modules()` gives them.

    Raises:
        LayerwiseOffloadError: FSDP puts gathered weights in the place of its shards for each use; data parallel
            wrappers keep weights in buckets and copies for training.
    """
    for path, part in parts:
        wrapper = _wrapper(part)
        if not wrapper:
            continue
        where = f"{name}.{path}" if path else name
        if wrapper in _SHARDERS:
            raise LayerwiseOffloadError(
                f"{name!r} can't be streamed: {where} is under {_SHARDERS[wrapper]}, which puts gathered weights in "
                f"the place of its shards while it runs. It can keep them on the host by itself, with "
                f"fully_shard(..., offload_policy=CPUOffloadPolicy()); leave {name!r} out then: "
                f"components=['all', '!{name}']. To stream it instead, load it anew without that."
            )
        raise LayerwiseOffloadError(
            f"{name!r} can't be streamed: {where} is wrapped in {_REPLICATORS[wrapper]}, which is made for training "
            f"and keeps hold of all weights. Use the module inside it ({where}.module)."
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
