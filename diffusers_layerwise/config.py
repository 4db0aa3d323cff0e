"""What a user may ask for: modes, sizes in bytes, and the options of `LayerwiseOffloadConfig`."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from typing import Any

from .device_maps import DeviceMap, read_device_map
from .errors import nearest


class Mode(str, enum.Enum):
    """How a plan is made.

    `AUTO`: everything resident when everything fits, else the fastest plan within the budget.
    `MEMORY`: the smallest peak: nothing resident but small weights, two ring slots for the largest module in a layer.
    `SPEED`: all free memory is spent on resident groups.
    `MANUAL`: only what `components` and `config` say.
    """

    AUTO = "auto"
    MEMORY = "memory"
    SPEED = "speed"
    MANUAL = "manual"


class Residency(str, enum.Enum):
    """How long resident groups keep their device memory.

    `USE`: from the first pass of a component in a pipeline call to the end of its use.
    `LASTING`: from the first pass on, until `handle.release()` or `remove()`.
    """

    USE = "use"
    LASTING = "lasting"


class Placement(str, enum.Enum):
    """Which groups become resident: where they cut predicted `STALL` most, `SPREAD` evenly, or a `PREFIX`."""

    STALL = "stall"
    SPREAD = "spread"
    PREFIX = "prefix"


class HostTier(str, enum.Enum):
    """Where a group's host copy lies.

    `PINNED`: page-locked memory, packed in execution order, one copy per group, asynchronous.
    `PAGEABLE`: wherever the weights were loaded; nothing is packed, copies are staged by the driver and hold up the
    host.
    `MAPPED`: the checkpoint's files, through their memory map and the system's page cache; takes no memory of its own.
    `FILE`: the checkpoint's files, read anew for each load past the page cache; takes no memory but for staging.
    `SHARED`: one copy for all ranks of a process group that are on this host and have the same weights.
    """

    PINNED = "pinned"
    PAGEABLE = "pageable"
    MAPPED = "mapped"
    FILE = "file"
    SHARED = "shared"

    @property
    def takes_memory(self) -> bool:
        """Whether weights in this tier are held in host memory of this process's own."""
        return self in (HostTier.PINNED, HostTier.PAGEABLE)


class Embeddings(str, enum.Enum):
    """Where the rows of embedding tables are looked up: on the `HOST`, or on the `DEVICE` like everything else."""

    HOST = "host"
    DEVICE = "device"


class Adapters(str, enum.Enum):
    """Where the weights of adapters (LoRA and its relatives) are while their component is in use.

    `RESIDENT`: on the device, apart from the layers that they adapt: these stay packed as they are when one is loaded.
    `STREAMED`: they come and go with their layer.
    """

    RESIDENT = "resident"
    STREAMED = "streamed"


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DEVICE = re.compile(r"(cuda|cpu|mps|xpu|npu|hpu|mlu)(:[0-9]+)?")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | float | str, name: str) -> int:
    """Reads a size in bytes: an int, or a text such as `"8GiB"`, `"500 MB"`, `"1.5g"` (bare k, m, g, t are binary).

    Args:
        value (`int`, `float` or `str`): The size.
        name (`str`): The argument's name, for the error.

    Raises:
        TypeError: `value` is neither a number nor a string.
        ValueError: It is not positive, not finite, or no such size.

    Example:
        >>> parse_bytes("8GiB", "memory_budget")
        8589934592
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name} must be bytes as an int or a text such as '8GiB', got {value!r}.")
    given = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{name} must be bytes as an int or a text such as '8GiB' or '500MB', got {value!r}."
                f"{meant_for(value, but=name) if name == 'memory_budget' else ''}"
            )
        value = float(match[1]) * _UNITS[match[2].lower()]
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"{name} must be more than 0 bytes, got {given!r}.")
    return int(value)


def format_bytes(count: float) -> str:
    """Writes a size for people: `format_bytes(8 << 30) == "8.00 GiB"`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{int(count)} B"


@dataclasses.dataclass(frozen=True)
class LayerwiseOffloadConfig:
    """Options of layerwise offload. Every field has a default that the plan chooses; an explicit value wins.

    Args:
        prefetch (`int` or `str`, *optional*): Groups loaded ahead of the one that computes (the ring holds one more
            than that), or as a text the bytes loaded ahead (`"256MiB"`).
        resident (`int` or `float`, *optional*): Groups kept on the device: a count (all of them where it is no less
            than there are), or (a float of at most 1.0) a share of the component's bytes.
        placement (`str`, defaults to `"stall"`): Which groups become resident, see [`Placement`].
        group_size (`int` or `str`, *optional*): Bytes that a group may have (`"64MiB"`), or `"layer"` for whole
            layers. A single module larger than that is a group of its own.
        residency (`str`, *optional*): `"use"` (a pipeline's default) or `"lasting"` (a bare module's), see
            [`Residency`].
        host (`str`, *optional*): The host tier, see [`HostTier`]. By default the plan chooses: `"pinned"` (on a CPU
            `"pageable"`), and `"file"` for what is in a checkpoint's files and doesn't fit the host's memory.
        host_memory_budget (`int` or `str`, *optional*, defaults to `"auto"`): Bytes of host memory that weights may
            take. `"auto"` is what the system and its control groups leave, less a reserve, divided among the processes
            of a launcher; None is no limit. Counts in `config` only.
        checkpoint (`str`, *optional*): The file or folder that the weights are in, where the model doesn't know it.
        embeddings (`str`, *optional*): `"host"` leaves embedding tables on the host, looks rows up there and moves
            those; `"device"` loads the tables. By default those of 16 MiB and more stay on the host where not
            everything fits, but for a denoiser's.
        activation_reserve (`int` or `str`, *optional*): Bytes of the budget left to activations. 0 makes the budget
            weights only. By default a tenth of the budget, at most 2 GiB (0 for a bare module).
        adapters (`str`, *optional*): What becomes of a LoRA's weights, see [`Adapters`]. By default `"resident"`, but
            `"streamed"` where all adapters together are larger than a sixteenth of their component.
        device_map (`Mapping[str, int | str | torch.device]`, *optional*): accelerate's kind of map (as
            `infer_auto_device_map` makes it): modules on the execution device are resident, `"cpu"` ones streamed.

    Example:
        >>> LayerwiseOffloadConfig.read({"prefetch": 2, "group_size": "64MiB"}).group_size
        67108864
    """

    prefetch: int | str | None = None
    resident: int | float | None = None
    placement: Placement = Placement.STALL
    group_size: int | str | None = None
    residency: Residency | None = None
    host: HostTier | None = None
    activation_reserve: int | None = None
    device_map: DeviceMap | None = None
    host_memory_budget: int | str | None = "auto"
    checkpoint: str | None = None
    embeddings: Embeddings | None = None
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        check_prefetch(self.prefetch, "config.prefetch")
        _share(self.resident)
        _set(self, "placement", _choice(Placement, self.placement, "config.placement"))
        if self.residency is not None:
            _set(self, "residency", _choice(Residency, self.residency, "config.residency"))
        if self.adapters is not None:
            _set(self, "adapters", _choice(Adapters, self.adapters, "config.adapters"))
        if self.host is not None:
            _set(self, "host", _choice(HostTier, self.host, "config.host"))
        if self.host_memory_budget not in (None, "auto"):
            read = parse_bytes(self.host_memory_budget, "config.host_memory_budget ('auto', None, or bytes)")
            _set(self, "host_memory_budget", read)
        _set(self, "checkpoint", _path(self.checkpoint))
        if self.embeddings is not None:
            _set(self, "embeddings", _choice(Embeddings, self.embeddings, "config.embeddings"))
        if self.group_size is not None and self.group_size != "layer":
            _set(self, "group_size", parse_bytes(self.group_size, "config.group_size (bytes or 'layer')"))
        if self.activation_reserve is not None and self.activation_reserve != 0:
            _set(self, "activation_reserve", parse_bytes(self.activation_reserve, "config.activation_reserve"))
        if self.device_map is not None:
            _set(self, "device_map", read_device_map(self.device_map, "config.device_map"))
            if self.resident is not None:
                raise ValueError("config.device_map and config.resident both say who is resident; give one of them.")

    @classmethod
    def read(cls, value: LayerwiseOffloadConfig | dict[str, Any] | None) -> LayerwiseOffloadConfig:
        """Takes a config, a dict of its fields, or None.

        Raises:
            TypeError: `value` is something else.
            ValueError: An unknown field (the message has the nearest one), or a value out of range.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise TypeError(
                f"config must be a LayerwiseOffloadConfig or a dict of its fields, got {value!r}."
                f"{meant_for(value, but='config')}"
            )
        fields = [f.name for f in dataclasses.fields(cls)]
        for key in value:
            if key not in fields:
                hint = nearest(str(key), fields)
                raise ValueError(f"config has no field {key!r}.{hint} The fields are {', '.join(fields)}.")
        return cls(**value)

    def merged(self, options: dict[str, Any]) -> LayerwiseOffloadConfig:
        """This config with the fields in `options` replaced, checked like [`read`]."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return type(self).read(given | options)


def read_mode(value: str | Mode) -> Mode:
    """Reads a mode by name.

    Raises:
        ValueError: No such mode; the message has the nearest one.
    """
    mode: Mode = _choice(Mode, value, "mode")
    return mode


def meant_for(value: Any, but: str) -> str:
    """`" Did you mean mode='memory'?"` for what another argument of an enable takes, or an empty string.

    Args:
        value: What was given.
        but (`str`): The argument that it was given as, which isn't suggested.

    Example:
        >>> meant_for("8GiB", but="mode")
        " Did you mean memory_budget='8GiB'?"
    """
    argument = "config" if isinstance(value, LayerwiseOffloadConfig) else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**20:
        argument = "memory_budget"
    if isinstance(value, str):
        size, word = _SIZE.fullmatch(value), value.strip().lower()
        if size is not None and size[2].lower() in _UNITS:
            argument = "memory_budget"
        elif word in [mode.value for mode in Mode]:
            argument = "mode"
        elif _DEVICE.fullmatch(word):
            argument = "onload_device"
    if argument in (None, but):
        return ""
    return f" Did you mean {argument}={'...' if argument == 'config' else repr(value)}?"


def check_prefetch(value: Any, name: str) -> None:
    """Checks a `prefetch`: None, a number of groups, or bytes as a text.

    Raises:
        TypeError, ValueError: It is something else; `name` is whose.
    """
    if not isinstance(value, str):
        _count(value, name)
        return
    if value.strip().isdigit():
        raise ValueError(
            f"{name} as a text is a size and needs a unit ('256MiB'), got {value!r}; for a number of groups pass an "
            f"int."
        )
    parse_bytes(value, f"{name} (groups, or bytes as a text)")


def _choice(kind: Any, value: Any, name: str) -> Any:
    valid = [member.value for member in kind]
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.strip().lower() in valid:
        return kind(value.strip().lower())
    hint = nearest(str(value), valid) or (meant_for(value, but=name) if name == "mode" else "")
    raise ValueError(f"{name} must be one of {valid}, got {value!r}.{hint}")


def _set(config: LayerwiseOffloadConfig, field: str, value: Any) -> None:
    object.__setattr__(config, field, value)


def _count(value: Any, name: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of groups, got {value!r}.")
    if value < 0:
        raise ValueError(f"{name} must be 0 or more groups, got {value!r}.")


def _path(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise TypeError(f"config.checkpoint must be the path of a file or folder, got {value!r}.")
    if not os.path.exists(value):
        raise ValueError(f"config.checkpoint: there is no {os.fspath(value)!r}.")
    return os.path.abspath(os.fspath(value))


def _share(value: Any) -> None:
    if isinstance(value, float):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"config.resident as a share must lie between 0.0 and 1.0, got {value!r}.")
        return
    _count(value, "config.resident")
