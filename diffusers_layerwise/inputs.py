"""Moving a call's inputs to the execution device, once, at the root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def move_inputs(value: Any, device: torch.device, skip: Sequence[str] | str | None = None) -> Any:
    """Moves every tensor in a nest of tuples, lists and dicts to `device`.

    A container in which nothing has to move is passed on as the same object: in-place caches that models fill during
    the call (a video VAE's `feat_cache`, a `kv_cache`) must stay the caller's.

    Args:
        value: Any input.
        device (`torch.device`): The execution device.
        skip (`str` or `Sequence[str]`, *optional*): Keys of the outermost dict to pass on untouched.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, dict):
        skipped = [skip] if isinstance(skip, str) else list(skip or [])
        moved = {k: v if k in skipped else move_inputs(v, device) for k, v in value.items()}
        if all(moved[k] is v for k, v in value.items()):
            return value
        return moved if type(value) is dict else _rebuilt(value, moved)
    if isinstance(value, (list, tuple)):
        items = [move_inputs(v, device) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _rebuilt(original: Any, moved: dict[Any, Any]) -> Any:
    try:
        return type(original)(**moved)
    except TypeError:
        return type(original)(moved)


def requires_grad(value: Any) -> bool:
    """Whether any tensor in a nest of containers requires a gradient."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(requires_grad(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(requires_grad(v) for v in value)
