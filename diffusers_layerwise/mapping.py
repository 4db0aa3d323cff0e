"""Which device map governs a component: its own, by which it was dispatched, or the one in its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from . import dispatched, platform
from .config import LayerwiseOffloadConfig, format_bytes
from .device_maps import CPU, DISK, check_names, covering
from .discovery import Component
from .dispatched import accelerators, align_hooks, dispatch_of, is_dispatched
from .errors import LayerwiseOffloadError
from .residence import Home, Residence, named_tensors

NO_REPLACING = (
    "Load it without device_map, or reset the map first (pipe.reset_device_map(), or "
    "accelerate.hooks.remove_hook_from_submodules(module) and module.to('cpu'))."
)


def main_device(modules: Iterable[nn.Module]) -> torch.device | None:
    """The execution device: accelerate's main one for most of what dispatched modules hold, or None."""
    count: Counter[torch.device] = Counter()
    for module in modules:
        if is_dispatched(module):
            main = dispatched.main_device(module)
            for device, size in accelerators(module):
                count[main or device] += size
    return max(count, key=lambda device: count[device]) if count else None


def crosses(modules: Iterable[nn.Module], device: torch.device) -> bool:
    """Whether any dispatched module uses another accelerator than the execution device."""
    return any(other != device for m in modules if is_dispatched(m) for other, _ in accelerators(m))


def is_hooked(module: nn.Module) -> bool:
    """Whether accelerate's hooks run a dispatched module, or ran it until it was taken over."""
    if not is_dispatched(module):
        return False
    return bool(dispatch_of(module).hooks) or any(align_hooks(part) for part in module.modules())


def residence(
    name: str, module: nn.Module, device: torch.device, config: LayerwiseOffloadConfig, only_loaded: bool = False
) -> Residence | None:
    """Where a component's weights live by the device map that governs it; None where there is no such map.

    Args:
        name (`str`): The component.
        module (`nn.Module`): Its module.
        device (`torch.device`): The execution device.
        config (`LayerwiseOffloadConfig`): Its options.
        only_loaded (`bool`): Its own map said where to load it, and no more.

    Raises:
        ValueError: The config's map doesn't fit the component.
        LayerwiseOffloadError: The maps contradict each other, or the component can't be run so.
    """
    explicit = config.device_map is not None or config.resident is not None
    if is_hooked(module):
        if explicit:
            field = "device_map" if config.device_map is not None else "resident"
            raise LayerwiseOffloadError(
                f"{name!r} is dispatched by a device map of its own, which says who is resident; config.{field} can't "
                f"say it too. Leave it out for {name!r}. {NO_REPLACING}"
            )
        return _checked(name, module, Residence(dispatch_of(module).homes, device))
    if config.device_map is not None:
        return Residence(_homes(module, config.device_map, device), device)
    if explicit or only_loaded or not is_dispatched(module):
        return None
    found = Residence(dispatch_of(module).homes, device)
    # Without hooks, what is elsewhere could get no inputs there: the map only said where to load it.
    return found if next(found.elsewhere(module), None) is None else None


def check_pipeline(
    pipe: Any, modules: Mapping[str, nn.Module], options: LayerwiseOffloadConfig, device: torch.device
) -> bool:
    """Looks at a pipeline's own device map. Returns whether it only says where to load all components.

    Raises:
        ValueError: The options for all components have a map, which names the parts of one.
        LayerwiseOffloadError: A component is mapped to a further accelerator and has no hooks that run it there.
    """
    if options.device_map is not None:
        raise ValueError(
            "config.device_map names the parts of one component: give it for that one, "
            "components={name: {'device_map': ...}}."
        )
    whole = getattr(pipe, "hf_device_map", None)
    for name, value in whole.items() if isinstance(whole, dict) else ():
        module = modules.get(name)
        if module is None or str(value) in (CPU, DISK) or is_hooked(module):
            continue
        mapped = platform.indexed(torch.device(value))
        if mapped != device:
            raise LayerwiseOffloadError(
                f"The pipeline's device map has {name!r} on {mapped}, but accelerate doesn't run it there: its inputs "
                f"would stay on {device}. Dispatch it with accelerate.dispatch_model(pipe.{name}, {{'': "
                f"{str(mapped)!r}}}, force_hooks=True), or call pipe.reset_device_map()."
            )
    return isinstance(whole, str)


def runs_elsewhere(module: nn.Module, device: torch.device) -> torch.device | None:
    """The further accelerator that has all of a dispatched component, or None."""
    if not is_hooked(module):
        return None
    found = Residence(dispatch_of(module).homes, device)
    weights: list[torch.Tensor] = [*module.parameters()] or [tensor for _, tensor in named_tensors(module)]
    if not weights or not all(found.is_elsewhere(tensor) for tensor in weights):
        return None
    return found.of(weights[0]).device


def refuse_elsewhere(name: str, device: torch.device, away: torch.device) -> LayerwiseOffloadError:
    """The error for a component that is asked for but stays on a further accelerator."""
    return LayerwiseOffloadError(
        f"{name!r} is dispatched to {away} as a whole, and layerwise offload runs on {device}: nothing of it would be "
        f"streamed. Leave it out of components, or pass onload_device={str(away)!r}. {NO_REPLACING}"
    )


def describe(component: Component, found: Residence) -> str:
    """What a component's device map comes to, for the report."""
    count: Counter[str] = Counter()
    seen: set[int] = set()
    for _, tensor in named_tensors(component.module):
        home = found.of(tensor)
        if id(home.tensor) in seen or not isinstance(tensor, nn.Parameter):
            continue
        seen.add(id(home.tensor))
        streamed = "streamed from disk" if home.on_disk else "streamed"
        where = streamed if home.device.type == CPU and found.device.type != CPU else f"on {home.device}"
        count[where] += tensor.numel() * tensor.element_size()
    parts = ", ".join(f"{format_bytes(size)} {where}" for where, size in count.items())
    return f"{component.name}: as its device map says: {parts}"


def _homes(module: nn.Module, device_map: Mapping[str, Any], device: torch.device) -> dict[int, Home]:
    """A module's homes by a map that only says who is resident."""
    tensors = dict(named_tensors(module))
    weights = [name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)]
    check_names(device_map, (path for path, _ in module.named_modules()), tensors, weights)
    homes: dict[int, Home] = {}
    for name, tensor in tensors.items():
        key = covering(device_map, name)
        home = device if key is None else _home(key, device_map[key], device)
        known = homes.get(id(tensor))
        # Tied weights that the map wants in two places stream.
        if known is None or known.device == device:
            homes[id(tensor)] = Home(tensor, home)
    return homes


def _home(key: str, value: int | str | torch.device, device: torch.device) -> torch.device:
    host = torch.device(CPU)
    if str(value) == CPU:
        return host
    found = None
    if isinstance(value, int):
        found = torch.device(device.type, value) if device.type != CPU else None
    elif value != DISK:
        found = platform.indexed(torch.device(value))
    if found != device:
        raise LayerwiseOffloadError(
            f"config.device_map puts {key!r} on {value!r}, but only {device} and 'cpu' can be chosen so. For disk or a "
            f"further accelerator call accelerate.dispatch_model(module, device_map, ...) first, then enable layerwise "
            f"offload without the option."
        )
    return device


def _checked(name: str, module: nn.Module, found: Residence) -> Residence:
    """Refuses modules that read weights of two accelerators at once: accelerate moves inputs, not weights."""
    for path, part in module.named_modules():
        own = [t for held in (part._parameters, part._buffers) for t in held.values() if t is not None]
        away = [t for t in own if found.is_elsewhere(t)]
        if not away:
            continue
        if len(away) == len(own) and all(found.is_elsewhere(tensor) for _, tensor in named_tensors(part)):
            continue
        where = found.of(away[0]).device
        raise LayerwiseOffloadError(
            f"{path or name!r} has weights of its own on {where}, and others of it or below it run on {found.device}, "
            f"so it can run on neither. Pass onload_device={str(where)!r}, or dispatch it with a map that keeps "
            f"{path or name!r} on one device."
        )
    return found


def refuse_split_units(component: Component, found: Residence) -> None:
    """Raises where weights that one call reads are on two accelerators.

    Raises:
        LayerwiseOffloadError: It names the module.
    """
    for unit in component.units:
        for trigger in unit.triggers:
            away = next(found.elsewhere(trigger), None)
            if away is not None:
                raise LayerwiseOffloadError(
                    f"{component.name}.{unit.name} reads all its weights at once, but its device map has "
                    f"{away[0]!r} on {away[1]} and others on {found.device}. Dispatch it with a map that keeps "
                    f"{unit.name!r} on one device."
                )
