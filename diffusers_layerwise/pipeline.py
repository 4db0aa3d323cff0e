"""Putting it on and taking it off: pipelines and bare modules."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from . import conflicts, dispatched, mapping, patches
from .components import Selected, Wanted, checked, find_wanted, may_be_module, read_device, renewed, to_host
from .config import HostTier, LayerwiseOffloadConfig, Mode, Residency, parse_bytes, read_mode
from .handle import HANDLE, OffloadHandle, take_over
from .hooks import install, place
from .host import HostStore
from .plan import Choice
from .runtime import Runtime, Terms
from .schedule import Schedule
from .selection import Components, select
from .transfer import Transfer


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
    if not isinstance(pipe, DiffusionPipeline):
        raise TypeError(f"enable_layerwise_offload needs a DiffusionPipeline, got {type(pipe).__name__}.")
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    signature = {name: value for name, value in pipe.components.items() if may_be_module(name, value)}
    modules = {name: value for name, value in signature.items() if isinstance(value, nn.Module)}
    device = read_device(mapping.main_device(modules.values()) if onload_device is None else onload_device)
    only_loaded = mapping.check_pipeline(pipe, modules, options, device)
    chosen = select(components, signature, chosen_mode, options)
    replaced = conflicts.check(pipe, {n: modules[n] for n in modules if n in chosen})
    if replaced:
        mapping.refuse_beside(modules, replaced)
    terms = Terms(chosen_mode, budget, options.activation_reserve, options.residency or Residency.USE, True)
    _runtime(find_wanted(modules, chosen, options, device, [], set(replaced), only_loaded), device, terms)
    # All checks have passed: from here on things change.
    before = pipe.__dict__.get(HANDLE)
    if before is not None:
        before.remove()
    if replaced:
        conflicts.replace(pipe)
    notes = [f"{name}: {what}" for name, what in replaced.items()]
    wanted = find_wanted(modules, chosen, options, device, notes, set(), only_loaded)
    handle = _start(wanted, device, terms, notes, mapping.crosses(modules.values(), device))
    _place_skipped(handle, modules, chosen, device, notes)
    handle._belongs_to(pipe)
    patches.wrap_call(type(pipe), _scope)
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
        raise TypeError(f"apply_layerwise_offload needs an nn.Module, got {type(module).__name__}.")
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    device = read_device(mapping.main_device([module]) if onload_device is None else onload_device)
    name = type(module).__name__
    conflicts.refuse_hooked(name, module)
    away = mapping.runs_elsewhere(module, device)
    if away is not None:
        raise mapping.refuse_elsewhere(name, device, away)
    residence = mapping.residence(name, module, device, options)
    component = checked(name, module, residence=residence)
    terms = Terms(chosen_mode, budget, options.activation_reserve or 0, options.residency or Residency.LASTING, False)
    return _start([Wanted(component, Choice.LAYERWISE, options, residence=residence)], device, terms, [])


def disable_layerwise_offload(pipe: DiffusionPipeline) -> None:
    """Makes a pipeline ordinary again. Also `pipe.disable_layerwise_offload()`. Idempotent.

    Raises:
        TypeError: `pipe` is no pipeline.
    """
    if not isinstance(pipe, DiffusionPipeline):
        raise TypeError(f"disable_layerwise_offload needs a DiffusionPipeline, got {type(pipe).__name__}.")
    handle = pipe.__dict__.get(HANDLE)
    if handle is not None:
        handle.remove()


def _start(
    wanted: list[Wanted], device: torch.device, terms: Terms, notes: list[str], crossing: bool = False
) -> OffloadHandle:
    """Makes the runtime (which checks the budget), and only then touches the modules."""
    runtime = _runtime(wanted, device, terms)
    homes: dict[str, dict[int, torch.device]] = {}
    moved = False
    for position, item in enumerate(wanted):
        taken = take_over(item.component.module)
        if item.residence is not None:
            if item.choice is Choice.LAYERWISE:
                notes.append(mapping.describe(item.component, item.residence))
            if dispatched.take(item.component.module, device, crossing):
                wanted[position] = item = renewed(item, device)
                taken = True
        homes[item.component.name] = to_host(item.component)
        moved = moved or taken or bool(homes[item.component.name])
    if moved:
        # The host copies are new memory: look again.
        runtime = _runtime([renewed(item, device) for item in wanted], device, terms)
    runtime.notes = notes
    for schedule in runtime.schedules:
        install(runtime, schedule)
        dispatched.return_outputs(schedule.component.module)
        patches.answer_device(schedule.component.module, device)
    return OffloadHandle(runtime, homes, notes)


def _runtime(wanted: list[Wanted], device: torch.device, terms: Terms) -> Runtime:
    transfer = Transfer(device)
    schedules = []
    for item in wanted:
        default = HostTier.PINNED if transfer.is_async else HostTier.PAGEABLE
        store = HostStore(device, item.config.host or default)
        schedules.append(Schedule(item.component, store, transfer, item.choice, item.config, item.unselected))
    return Runtime(transfer, schedules, terms)


def _place_skipped(
    handle: OffloadHandle, modules: dict[str, nn.Module], chosen: Selected, device: torch.device, notes: list[str]
) -> None:
    """Skipped components answer the execution device; nothing else is done to them."""
    for name, module in modules.items():
        if name in chosen and chosen[name][0] is Choice.SKIP:
            if dispatched.is_dispatched(module):
                notes.append(f"{name}: skipped as asked; accelerate runs it, as its device map says")
                continue
            place(module, device)
            patches.answer_device(module, device)
            handle._placed.append(module)
            notes.append(f"{name}: skipped as asked; its weights stay where they are")


def _scope(pipe: Any) -> contextlib.AbstractContextManager[None] | None:
    handle = pipe.__dict__.get(HANDLE)
    return None if handle is None else handle._call()


def attach_methods() -> None:
    """Puts the methods on `DiffusionPipeline`: called at import; initialises no device."""
    patches.attach(
        {
            "enable_layerwise_offload": enable_layerwise_offload,
            "disable_layerwise_offload": disable_layerwise_offload,
            "layerwise_offload": property(lambda pipe: pipe.__dict__.get(HANDLE), doc="The handle, or None."),
        }
    )


__all__ = [
    "OffloadHandle",
    "apply_layerwise_offload",
    "attach_methods",
    "disable_layerwise_offload",
    "enable_layerwise_offload",
]
