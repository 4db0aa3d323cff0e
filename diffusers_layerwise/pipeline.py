"""Putting it on and taking it off: pipelines and bare modules."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from . import conflicts, mapping, patches, progress, switches
from .auto import Policy
from .compiled import plain
from .components import Wanted, checked, read_device
from .config import LayerwiseOffloadConfig, Mode, Residency, parse_bytes, read_mode
from .handle import HANDLE, OffloadHandle, handle_of
from .members import Members, Selection
from .plan import Choice
from .profiles import find_profile
from .registries import wrap_registry
from .selection import Components
from .slots import modules_of
from .terms import Terms


def enable_layerwise_offload(
    pipe: DiffusionPipeline,
    components: Components = None,
    mode: str | Mode = "auto",
    *,
    onload_device: torch.device | str | None = None,
    memory_budget: int | str | None = None,
    config: LayerwiseOffloadConfig | dict[str, Any] | None = None,
) -> OffloadHandle:
    """Streams a pipeline's components layer by layer. Also `pipe.enable_layerwise_offload(...)`.

    Results are bit-identical to the pipeline resident on the same device. Calling it again replaces the earlier call.

    Args:
        pipe (`DiffusionPipeline`): The pipeline.
        components (`str`, `list` or `dict`, *optional*): Names (`"transformer"`), sets (`"all"`, `"dit"`,
            `"default"`, `"text_encoder"`, `"image_encoder"`, `"vae"`), exclusions (`"!vae"`); as a dict, name to
            `"layerwise"`, `"resident"`, `"offload"`, `"skip"` or options. None: all of them. What isn't selected is
            resident when it fits, else offloaded as a whole.
        mode (`str`): `"auto"`, `"memory"`, `"speed"` or `"manual"`, see [`Mode`].
        onload_device (`torch.device`, *optional*): The execution device; the accelerator by default, else the CPU.
        memory_budget (`int` or `str`, *optional*): Device bytes for weights, ring and activations (`"8GiB"`). None
            reads the free memory at the first call.
        config (`LayerwiseOffloadConfig` or `dict`, *optional*): Options for all components.

    Returns:
        `OffloadHandle`

    Raises:
        TypeError, ValueError: Bad arguments; nothing was changed.
        LayerwiseOffloadError: A named component can't be streamed, or another offload is in the way.
        torch.OutOfMemoryError: The budget is below the smallest that works (which the message says).

    Example:
        >>> handle = pipe.enable_layerwise_offload(memory_budget="8GiB")
        >>> image = pipe("a fox").images[0]
        >>> print(handle.report())
    """
    _need_pipeline(pipe, "enable_layerwise_offload needs a DiffusionPipeline", "use apply_layerwise_offload(module)")
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    policy = None
    if chosen_mode is Mode.AUTO:
        policy = Policy(find_profile(pipe), budget is not None, components is not None)
    terms = Terms(chosen_mode, budget, options.activation_reserve, options.residency or Residency.USE, True, policy)
    device = read_device(mapping.main_device(modules_of(pipe).values()) if onload_device is None else onload_device)
    members = Members(Selection(components, chosen_mode, options, device, terms))
    before = handle_of(pipe)
    pipes = [pipe] if before is None else before._followers(pipe)
    for each in pipes:
        members.add_pipe(each)
    members.examine(explicit=True)
    # All checks have passed: from here on things change.
    if before is not None:
        before._detach(pipe)
    for kind in patches.loaded_pipelines():
        # Not its own class alone: another pipeline made before may share its modules.
        switches.wrap(kind)
    switches.wrap_models(modules_of(pipe).values())
    switches.wrap_manager()
    wrap_registry()
    try:
        with progress.using(pipe, is_call=False):
            members.make(members.examine(explicit=True))
    except BaseException:
        # Seen only with the weights back where they came from: as if nothing had been called.
        if before is not None:
            before._revive(pipes)
        raise
    handle = members.handle = OffloadHandle(members)
    for each in pipes:
        handle._attach(each)
    return handle


def apply_layerwise_offload(
    module: nn.Module,
    mode: str | Mode = "auto",
    *,
    onload_device: torch.device | str | None = None,
    memory_budget: int | str | None = None,
    config: LayerwiseOffloadConfig | dict[str, Any] | None = None,
) -> OffloadHandle:
    """Streams any module layer by layer. The budget is its weights and ring; residents stay until `handle.release()`.

    Args:
        module (`nn.Module`): The module, called under `torch.no_grad()` or `torch.inference_mode()`.
        mode, onload_device, memory_budget, config: As for [`enable_layerwise_offload`].

    Returns:
        `OffloadHandle`

    Raises:
        TypeError, ValueError: Bad arguments; nothing was changed.
        LayerwiseOffloadError: The module has nothing to stream, or another offload is in the way.
        torch.OutOfMemoryError: The budget is below the smallest that works (which the message says).

    Example:
        >>> handle = apply_layerwise_offload(transformer, "memory", onload_device="cuda")
    """
    if not isinstance(module, nn.Module):
        is_pipe = isinstance(module, tuple(patches.pipeline_classes()))
        other = " For a pipeline call pipe.enable_layerwise_offload()." if is_pipe else ""
        raise TypeError(f"apply_layerwise_offload needs an nn.Module, got {type(module).__name__}.{other}")
    module = plain(module)
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    device = read_device(mapping.main_device([module]) if onload_device is None else onload_device)
    name = type(module).__name__
    conflicts.check({name: module})
    away = mapping.runs_elsewhere(module, device)
    if away is not None:
        raise mapping.refuse_elsewhere(name, device, away)
    residence = mapping.residence(name, module, device, options)
    component = checked(name, module, device, conflicts.is_replaceable(module), residence, options.adapters)
    terms = Terms(chosen_mode, budget, options.activation_reserve or 0, options.residency or Residency.LASTING, False)
    members = Members(Selection(None, chosen_mode, options, device, terms), bare=module)
    members.adopt_bare(Wanted(component, Choice.LAYERWISE, options, residence=residence))
    switches.wrap_models([module])
    wrap_registry()
    handle = members.handle = OffloadHandle(members)
    return handle


def disable_layerwise_offload(pipe: DiffusionPipeline) -> None:
    """Makes a pipeline ordinary again. Also `pipe.disable_layerwise_offload()`. Idempotent.

    Raises:
        TypeError: `pipe` is no pipeline.
    """
    _need_pipeline(pipe, "disable_layerwise_offload needs a DiffusionPipeline", "call handle.remove()")
    handle = handle_of(pipe)
    if handle is not None:
        with progress.using(pipe, is_call=False):
            handle._detach(pipe)


def _need_pipeline(value: Any, what: str, for_module: str) -> None:
    if not isinstance(value, tuple(patches.pipeline_classes())):
        other = f" For a module {for_module}." if isinstance(value, nn.Module) else ""
        raise TypeError(f"{what}, got {type(value).__name__}.{other}")


def attach_methods() -> None:
    """Puts the methods on `DiffusionPipeline`: called at import; initialises no device."""
    patches.attach(
        patches.pipeline_classes(),
        {
            "enable_layerwise_offload": enable_layerwise_offload,
            "disable_layerwise_offload": disable_layerwise_offload,
            "layerwise_offload": property(lambda pipe: pipe.__dict__.get(HANDLE), doc="The handle, or None."),
        },
    )


__all__ = [
    "OffloadHandle",
    "apply_layerwise_offload",
    "attach_methods",
    "disable_layerwise_offload",
    "enable_layerwise_offload",
]
