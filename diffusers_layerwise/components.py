"""A pipeline's components, looked through before anything is touched: what to stream, what not, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from . import compiled, mapping, platform, progress, ranks
from .casting import casts
from .config import Adapters, LayerwiseOffloadConfig
from .discovery import Component, discover
from .dispatched import is_dispatched
from .errors import LayerwiseOffloadError, WrongLayersError
from .hooks import outer_component
from .parts import made_for_its_device, settle
from .plan import Choice
from .residence import Residence
from .tensors import plain_data, plain_tensors

Selected = dict[str, tuple[Choice, LayerwiseOffloadConfig, bool]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One component as selected, checked.

    `unselected`: nobody named it, so it is resident or offloaded as a whole. `residence`: what its device map says.
    """

    component: Component
    choice: Choice
    config: LayerwiseOffloadConfig
    unselected: bool = False
    residence: Residence | None = None


def find_wanted(
    modules: dict[str, nn.Module],
    chosen: Selected,
    options: LayerwiseOffloadConfig,
    device: torch.device,
    notes: list[str],
    on_meta: set[str],
    only_loaded: bool = False,
) -> list[Wanted]:
    """The components to hook: selected ones, then the rest as whole components.

    Args:
        modules (`dict[str, nn.Module]`): The pipeline's modules.
        chosen (`dict`): What [`select`] made of the user's selection.
        options (`LayerwiseOffloadConfig`): For what isn't selected.
        device (`torch.device`): The execution device.
        notes (`list[str]`): Gets a line for each component that a group picked and that can't be streamed.
        on_meta (`set[str]`): Those whose weights another offload still holds back: they are checked by shape.
        only_loaded (`bool`): The components' device maps said where to load them, and no more.

    Raises:
        LayerwiseOffloadError: A component named exactly can't be treated as asked.
    """
    wanted: list[Wanted] = []
    seen: set[int] = set()
    for name, module in modules.items():
        choice, config, exact = chosen.get(name, (Choice.OFFLOAD, options, False))
        if choice is Choice.SKIP:
            if not is_dispatched(module) and not ranks.is_sharded_by_itself(module):
                _check_skipped(name, module, device)
            continue
        if id(module) in seen or (not exact and all(p.numel() == 0 for p in module.parameters())):
            continue
        seen.add(id(module))
        if not exact and ranks.is_sharded_by_itself(module):
            notes.append(f"{name}: left alone: FSDP shards it, and moves its shards itself")
            continue
        away = mapping.runs_elsewhere(module, device)
        if away is not None:
            if exact:
                raise mapping.refuse_elsewhere(name, device, away)
            notes.append(f"{name}: resident on {away}, as its device map says")
            continue
        try:
            wanted.append(
                _wanted(name, module, (choice, config, name not in chosen), device, name in on_meta, only_loaded)
            )
        except WrongLayersError:
            raise
        except LayerwiseOffloadError as error:
            if exact or (outer_component(module) is None and _is_away(module, device)):
                # Left out it would meet inputs that are on the device: say it now, not in the first call.
                raise
            notes.append(f"{name}: skipped: {error}")
    return wanted


def _wanted(
    name: str,
    module: nn.Module,
    how: tuple[Choice, LayerwiseOffloadConfig, bool],
    device: torch.device,
    on_meta: bool,
    only_loaded: bool,
) -> Wanted:
    """One component, checked; one that nobody selected but that a device map governs is streamed as the map says."""
    choice, config, unselected = how
    residence = mapping.residence(name, module, device, config, only_loaded)
    if unselected and residence is not None:
        choice, unselected = Choice.LAYERWISE, False
    component = checked(name, module, device, on_meta, residence, config.adapters)
    return Wanted(component, choice, config, unselected, residence)


def _refuse_layouts(component: Component, device: torch.device) -> None:
    """Quantised weights that were laid out for another kind of device than the one that will compute with them."""
    for entry in component.entries():
        if made_for_its_device(entry.held, device):
            kind, here = type(entry.held).__qualname__, entry.held.device.type
            raise LayerwiseOffloadError(
                f"{component.name!r} can't be streamed to {device}: {entry.name.removesuffix(entry.path)} is a {kind}, "
                f"whose bytes are laid out for {here!r}. Move the component to {device.type!r} before "
                f"enable_layerwise_offload() (it is brought back to the host as it is there), or quantise it there."
            )


def _refuse_compiled(component: Component, device: torch.device) -> None:
    """Compiled code that can't run on weights that move."""
    name, module = component.name, component.module
    if compiled.is_whole(module) and compiled.compiler_of(module) is None:
        raise LayerwiseOffloadError(
            f"{name!r} is compiled as a whole, by something whose options can't be read, so its blocks can't be "
            f"compiled in its place. Compile the repeated blocks instead: pipe.{name}.compile_repeated_blocks()."
        )
    if device.type != "cpu" and compiled.is_set("triton.cudagraphs", module, component.regions):
        raise LayerwiseOffloadError(
            f"{name!r} is compiled with CUDA graphs, which are recorded for weights at fixed addresses, and would be "
            f"recorded anew in each pass. Compile it without them: mode='max-autotune-no-cudagraphs' instead of "
            f"'max-autotune', no mode instead of 'reduce-overhead'."
        )
    if compiled.is_set("freezing", module, component.regions):
        raise LayerwiseOffloadError(
            f"{name!r} is compiled with inductor's freezing, which reads weights where they lay when it was compiled; "
            f"by then other layers lie there. Compile it without: no options={{'freezing': True}}, and "
            f"torch._inductor.config.freezing = False (TORCHINDUCTOR_FREEZING=0)."
        )


def renewed(item: Wanted, device: torch.device) -> Wanted:
    """A component looked at again, after its weights came to be in other memory."""
    component, residence = item.component, item.residence
    if residence is not None:
        residence = mapping.residence(component.name, component.module, device, item.config)
    return dataclasses.replace(
        item,
        component=discover(component.module, component.name, residence=residence, adapters=item.config.adapters),
        residence=residence,
    )


def _is_away(module: nn.Module, device: torch.device) -> bool:
    return any(t.device not in (device, torch.device("meta")) for t in [*module.parameters(), *module.buffers()])


def _check_skipped(name: str, module: nn.Module, device: torch.device) -> None:
    """A skipped component is never moved, so it must be where it will run."""
    elsewhere = next((t for t in [*module.parameters(), *module.buffers()] if t.device != device), None)
    if elsewhere is not None:
        raise LayerwiseOffloadError(
            f"components[{name!r}] is 'skip', so its weights are never moved, but they are on {elsewhere.device} and "
            f"the pipeline runs on {device}. Move it first (pipe.{name}.to({str(device)!r})), or use 'offload'."
        )


def checked(
    name: str,
    module: nn.Module,
    device: torch.device,
    on_meta: bool = False,
    residence: Residence | None = None,
    adapters: Adapters | None = None,
) -> Component:
    """A component, or an error that says why it can't be streamed."""
    ranks.refuse_wrapped(name, module, module.named_modules())
    component = discover(module, name, on_meta, residence, adapters)
    if residence is not None:
        mapping.refuse_split_units(component, residence)
    outer = outer_component(module)
    if outer is not None:
        raise LayerwiseOffloadError(
            f"{name!r} is a part of {outer!r}, which is under layerwise offload already and streams it. Take that off "
            f"first (handle.remove() or disable_layerwise_offload()), or leave {name!r} out."
        )
    if not component.weights and not component.unmovable:
        raise LayerwiseOffloadError(
            f"{name!r} ({type(module).__name__}) has no parameters, so there is nothing to stream. Leave it out."
        )
    refuse_unmovable(component, device)
    return component


def refuse_unmovable(component: Component, device: torch.device) -> None:
    """Raises where a component has a tensor whose bytes can't be moved, or can't be read on the device."""
    if component.unmovable:
        more = f" and {len(component.unmovable) - 1} more" if len(component.unmovable) > 1 else ""
        meta = any("meta device" in reason for reason in component.unmovable)
        remedy = "Load its weights first (from_pretrained, load_state_dict)." if meta else "Leave it out of components."
        raise LayerwiseOffloadError(f"{component.name!r} can't be streamed: {component.unmovable[0]}{more}. {remedy}")
    if casts(component.module):
        raise LayerwiseOffloadError(
            f"{component.name!r} can't be streamed: layerwise casting converts it as a whole, all weights at once, in "
            f"each pass. Load it anew and use enable_layerwise_casting() with a skip_modules_pattern: that converts "
            f"layer by layer."
        )
    held = ((entry.name.removesuffix(entry.path), entry.held) for entry in component.entries() if entry.path)
    ranks.refuse_meshes(component.name, held, device)
    _refuse_layouts(component, device)
    _refuse_compiled(component, device)


def to_host(component: Component) -> dict[int, torch.device]:
    """Moves weights that lie on a device to the CPU; says where each came from."""
    homes: dict[int, torch.device] = {}
    away = [entry for entry in component.entries() if entry.tensor.device.type != "cpu"]
    total = sum(entry.tensor.nbytes for entry in away)
    with plain_tensors(), progress.bar(f"{component.name}: moving to the host", total) as advance:
        for entry in away:
            homes[id(entry.tensor)] = entry.tensor.device
            entry.tensor.data = plain_data(entry.tensor).to("cpu")
            advance(entry.tensor.nbytes)
        settle(entry.held for entry in component.entries() if id(entry.tensor) in homes)
    return homes


def read_device(device: torch.device | str | None) -> torch.device:
    """The execution device that an argument means, with its index; the accelerator, else the CPU, when it is None.

    Raises:
        ValueError: No such device, `meta`, or none that this build of torch can use.
    """
    if device is None:
        return platform.default_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"onload_device must be a device such as 'cuda' or 'cpu', got {device!r}: {error}") from error
    if found.type == "meta":
        raise ValueError("onload_device can't be 'meta': nothing can be computed there.")
    platform.refuse_absent(found, f"onload_device={str(device)!r} can't be used")
    return platform.indexed(found)


def may_be_module(name: str, value: Any) -> bool:
    """Whether a name in the pipeline's signature can hold a module: it does, or it is empty and of no other kind."""
    if value is not None:
        return isinstance(value, nn.Module)
    kinds = ("tokenizer", "scheduler", "feature_extractor", "processor", "image_processor", "watermark")
    return not any(kind in name for kind in kinds)
