"""Other offloads that a pipeline may carry: found, replaced where that is clean, else refused by name."""

from __future__ import annotations

from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook
from diffusers import DiffusionPipeline
from torch import nn

from .dispatched import is_dispatched
from .errors import LayerwiseOffloadError


def _hooks(module: nn.Module) -> list[object]:
    hook = module.__dict__.get("_hf_hook")
    return list(hook.hooks) if isinstance(hook, SequentialHook) else [hook] if hook is not None else []


def found(module: nn.Module) -> str | None:
    """Names the offload that a module is under, or None: `model`, `sequential`, `device_map` or `group`."""
    if any(isinstance(hook, CpuOffload) for hook in _hooks(module)):
        return "model"
    if is_dispatched(module):
        return "device_map"
    if any(isinstance(hook, AlignDevicesHook) for m in module.modules() for hook in _hooks(m)):
        return "sequential"
    for m in module.modules():
        registry = m.__dict__.get("_diffusers_hook")
        if registry is not None and any("group_offloading" in name for name in registry.hooks):
            return "group"
    return None


def check(pipe: DiffusionPipeline, selected: dict[str, nn.Module]) -> dict[str, str]:
    """Finds the offloads that [`replace`] will take off, and refuses what can't be taken off.

    Returns:
        For each component, what will be replaced.

    Raises:
        LayerwiseOffloadError: A component is under group offload.
    """
    states = {name: found(module) for name, module in pipe.components.items() if isinstance(module, nn.Module)}
    for name in selected:
        _refuse(name, states[name])
    return {name: f"{state} offload replaced" for name, state in states.items() if state in ("model", "sequential")}


def replace(pipe: DiffusionPipeline) -> None:
    """Takes model and sequential offload off a pipeline; its weights are then on the CPU."""
    pipe.remove_all_hooks()


def refuse_hooked(name: str, module: nn.Module) -> None:
    """Raises when a bare module is under another offload.

    Raises:
        LayerwiseOffloadError: It names the offload and how to take it off.
    """
    state = found(module)
    if state in ("model", "sequential"):
        raise LayerwiseOffloadError(
            f"{name!r} is under accelerate's {state} offload. Take it off first: "
            f"accelerate.hooks.remove_hook_from_module(module, recurse=True)."
        )
    _refuse(name, state)


def _refuse(name: str, state: str | None) -> None:
    if state == "group":
        raise LayerwiseOffloadError(
            f"{name!r} is under diffusers' group offload, which can't be switched off. Load the pipeline anew and call "
            f"enable_layerwise_offload() instead of enable_group_offload()."
        )
