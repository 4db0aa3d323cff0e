"""Device maps as text: what accelerate writes and reads, `{module or parameter path: device}`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from .errors import nearest

DeviceMap = Mapping[str, int | str | torch.device]

#: Values that name host memory and files rather than a device.
CPU, DISK = "cpu", "disk"


def read_device_map(value: object, name: str) -> dict[str, int | str | torch.device]:
    """Checks the form of a device map.

    Args:
        value (`Mapping[str, int | str | torch.device]`): The map.
        name (`str`): The argument's name, for the error.

    Raises:
        TypeError: No mapping, a key that is no string, or a value that is no device.
        ValueError: An empty map, or a value that names no device.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict from module names to devices, got {value!r}.")
    if not value:
        raise ValueError(f"{name} is empty; {{'': 'cpu'}} streams everything.")
    return {_key(key, name): _value(key, device, name) for key, device in value.items()}


def _key(key: object, name: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{name} must name modules or parameters by string, got {key!r}.")
    return key


def _value(key: str, device: object, name: str) -> int | str | torch.device:
    what = f"{name}[{key!r}] must be a device index, a device such as 'cuda:0', 'cpu' or 'disk', got {device!r}"
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f"{what}.")
    if isinstance(device, int) and device < 0:
        raise ValueError(f"{what}.")
    if isinstance(device, str) and device != DISK:
        try:
            return torch.device(device) if device != CPU else CPU
        except RuntimeError as error:
            raise ValueError(f"{what}.{nearest(device, [CPU, DISK])}") from error
    return device


def covering(device_map: DeviceMap, name: str) -> str | None:
    """The key that decides for a tensor: its own name, else its innermost module's that the map has, else None."""
    while name:
        if name in device_map:
            return name
        name = name.rpartition(".")[0]
    return "" if "" in device_map else None


def check_names(device_map: DeviceMap, modules: Iterable[str], tensors: Iterable[str], weights: Iterable[str]) -> None:
    """Checks that a map's keys exist and that every weight has one.

    Raises:
        ValueError: It names the keys without a module or parameter (with the nearest name), or the weights without one.
    """
    valid = {*modules, *tensors}
    unknown = [key for key in device_map if key not in valid]
    if unknown:
        hint = nearest(unknown[0], valid)
        raise ValueError(f"config.device_map names {unknown}, which the component doesn't have.{hint}")
    missing = [name for name in weights if covering(device_map, name) is None]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(f"config.device_map has no entry for {', '.join(missing[:8])}{more}.")


def device_value(device: str) -> int | str:
    """A device as accelerate's maps write it: its index where it has one."""
    kind, _, index = device.partition(":")
    return int(index) if index and kind != CPU else kind


def shortest(values: Mapping[str, int | str]) -> dict[str, int | str]:
    """The shortest device map that gives each tensor its value; no entry lies below another one.

    Args:
        values (`Mapping[str, int | str]`): Tensor names, and what each one's value is.

    Example:
        >>> shortest({"a.weight": 0, "a.bias": 0, "b.weight": "cpu"})
        {'a': 0, 'b': 'cpu'}
    """
    agreed: dict[str, int | str | None] = {}
    for name, value in values.items():
        for prefix in _prefixes(name):
            if agreed.setdefault(prefix, value) != value:
                agreed[prefix] = None
    found: dict[str, int | str] = {}
    for name in values:
        for prefix in _prefixes(name):
            value_there = agreed[prefix]
            # accelerate stores nothing of what "" puts on disk, and so could not read it back.
            if value_there is not None and (prefix or value_there != DISK):
                found[prefix] = value_there
                break
    return found


def _prefixes(name: str) -> list[str]:
    """A name and its parents, the outermost (`""`) first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]
