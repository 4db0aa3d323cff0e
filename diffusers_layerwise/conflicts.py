"""Other offloads that a component may be under: found, taken off where that is clean and put back, else refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, CpuOffload, add_hook_to_module, remove_hook_from_module
from diffusers import DiffusionPipeline
from torch import nn

from .compiled import carrier
from .dispatched import is_dispatched
from .errors import LayerwiseOffloadError
from .hooks import hooks_of

#: The offloads that can be taken off a component, as [`found`] names them.
REPLACEABLE = ("model", "sequential", "group", "auto")
_GROUP_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")


@dataclasses.dataclass(frozen=True)
class TakenOff:
    """Another offload that was taken off one component: which, and how to put it back."""

    module: nn.Module
    state: str
    put_back: Callable[[], object]


def found(module: nn.Module) -> str | None:
    """Names the offload that a module is under: `model`, `sequential`, `device_map`, `group`, `auto`, or None.

    `auto` is that of diffusers' `ComponentsManager`.
    """
    if any(isinstance(hook, CpuOffload) for hook in hooks_of(module)):
        return "model"
    if any(_is_auto(hook) for hook in hooks_of(module)):
        return "auto"
    if is_dispatched(module):
        return "device_map"
    if any(isinstance(hook, AlignDevicesHook) for m in module.modules() for hook in hooks_of(m)):
        return "sequential"
    return "group" if _group_hook(module) is not None else None


def _is_auto(hook: object) -> bool:
    # By name: importing diffusers' modular pipelines for its class takes a second.
    return type(hook).__name__ == "CustomOffloadHook"


def _group_hook(module: nn.Module) -> Any:
    for part in module.modules():
        registry = part.__dict__.get("_diffusers_hook")
        if registry is not None and "group_offloading" in registry.hooks:
            return registry.hooks["group_offloading"]
    return None


def check(selected: dict[str, nn.Module]) -> dict[str, str]:
    """Finds the offloads that have to be taken off the selected components, and refuses what can't be taken off.

    Returns:
        For each component under another offload, its name.

    Raises:
        LayerwiseOffloadError: A component is under group offload on disk.
    """
    states = {name: found(module) for name, module in selected.items()}
    for name, module in selected.items():
        _refuse(name, module, states[name])
    return {name: state for name, state in states.items() if state in REPLACEABLE}


def is_replaceable(module: nn.Module) -> bool:
    """Whether a module is under an offload that [`take_off`] takes off."""
    return found(module) in REPLACEABLE


def take_off(module: nn.Module) -> TakenOff | None:
    """Takes another offload off a component, whose weights are then the ones on the module. Idempotent."""
    state = found(module)
    hooked = carrier(module)
    if state in ("model", "auto"):
        hook = next(h for h in hooks_of(module) if isinstance(h, CpuOffload) or _is_auto(h))
        remove_hook_from_module(hooked)
        return TakenOff(module, state, lambda: add_hook_to_module(hooked, hook))
    if state == "sequential":
        device = _execution_device(module)
        remove_hook_from_module(hooked, recurse=True)
        buffers = len(module._parameters) > 0
        return TakenOff(module, state, lambda: cpu_offload(hooked, device, offload_buffers=buffers))
    return _take_group_off(module) if state == "group" else None


def _execution_device(module: nn.Module) -> torch.device | None:
    for part in module.modules():
        for hook in hooks_of(part):
            if isinstance(hook, AlignDevicesHook) and hook.execution_device is not None:
                return hook.execution_device  # type: ignore[no-any-return]
    return None


def _take_group_off(module: nn.Module) -> TakenOff:
    from diffusers.hooks.group_offloading import _apply_group_offloading

    config = _group_hook(module).config
    for part in module.modules():
        registry = part.__dict__.get("_diffusers_hook")
        if registry is None:
            continue
        hook = registry.hooks.get("group_offloading")
        if hook is not None and _is_onloaded(hook.group):
            # Loaded ahead on a stream of its own, which only diffusers knows: let it come back the way it does.
            hook.group.offload_()
        for name in _GROUP_HOOKS:
            if name in registry.hooks:
                registry.remove_hook(name, recurse=False)
    return TakenOff(module, "group", lambda: _apply_group_offloading(module, config))


def _is_onloaded(group: Any) -> bool:
    held = [t for m in group.modules for t in [*m.parameters(), *m.buffers()]]
    return any(t.device.type != "cpu" for t in [*held, *group.parameters, *group.buffers])


def has_chain(pipe: Any) -> bool:
    """Whether model offload is active on a pipeline."""
    return isinstance(pipe, DiffusionPipeline) and bool(getattr(pipe, "_all_hooks", None))


def rechain(pipe: Any) -> None:
    """Lets model offload chain what it still sees of a pipeline, in its own order; there may be nothing left."""
    pipe.enable_model_cpu_offload(device=pipe._offload_device)


def _refuse(name: str, module: nn.Module, state: str | None) -> None:
    if state == "group" and _group_hook(module).group.offload_to_disk_path is not None:
        raise LayerwiseOffloadError(
            f"{name!r} is under diffusers' group offload to disk, which doesn't keep its weights in memory and can't "
            f"be switched off. Load the pipeline anew and call enable_layerwise_offload() instead."
        )
