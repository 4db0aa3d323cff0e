"""A simulated accelerator: a PyTorch device called `sim` that catches missing waits and counts what moves.

Import it before diffusers, which remembers the devices it finds when it is first imported. See README.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from simdev.toolchain import BuildError, Unavailable, available, load_native

__all__ = ["BuildError", "Unavailable", "available"]

DeviceLike = torch.device | str | int | None

_PRIVATE_USE_1 = 20  # the number of this kind of device in torch.Stream
_MODES = {"off": 0, "poison": 1, "raise": 2}

_C = load_native()
torch.utils.rename_privateuse1_backend("sim")
OPS_TAKEN: int = _C.take_cpu_ops()


# ---- what torch expects of a device module, under the names that torch.cuda has for it


class Stream(torch.Stream):
    """Makes a new stream on a `sim` device."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **_: Any) -> torch.Stream:
        """Returns a plain torch.Stream: torch's own functions accept no subclass of its events and streams."""
        return torch.Stream(device=torch.device("sim", _index(device)), priority=priority)


class Event(torch.Event):
    """Makes a new event for `sim` streams."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        """Returns a plain torch.Event, for the same reason as Stream does."""
        return torch.Event(device="sim", enable_timing=enable_timing)


def _index(device: DeviceLike = None) -> int:
    """Returns a device's number; that of the current one where none is named."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _C.current_device() if index is None else index


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Returns the stream that this thread's work on a device goes to."""
    return torch.accelerator.current_stream(torch.device("sim", _index(device)))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Returns the stream that a device starts with."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_PRIVATE_USE_1)


def set_stream(stream: torch.Stream) -> None:
    """Sends this thread's work to `stream` from now on, and makes its device the current one."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Sends this thread's work to `stream` for a while. None changes nothing."""
    if stream is None:
        yield
        return
    outer_device = current_device()
    outer_stream = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(outer_stream)
        set_device(outer_device)


@contextlib.contextmanager
def device(device: DeviceLike) -> Iterator[None]:
    """Makes a device the current one for a while."""
    outer = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(outer)


def synchronize(device: DeviceLike = None) -> None:
    """Waits for everything queued on a device."""
    _C.synchronize(_index(device))


def is_available() -> bool:
    """Whether there is a device. There is, once this module could be imported."""
    return True


def is_initialized() -> bool:
    """Whether the device is ready for use."""
    return True


def init() -> None:
    """Does nothing: importing has done it."""


def _lazy_init() -> None:
    """Does nothing: importing has done it."""


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that used the device, which does no harm here."""
    return False


def device_count() -> int:
    """Returns how many devices there are; `configure(ndev=...)` sets it."""
    return _C.device_count()


def current_device() -> int:
    """Returns the number of this thread's current device."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Sets this thread's current device."""
    _C.set_device(_index(device))


def manual_seed(seed: int) -> None:
    """Seeds the generator that `sim` shares with the CPU."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the generator that all devices share with the CPU."""
    torch.default_generator.manual_seed(seed)


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Returns the state of the generator shared with the CPU."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Sets the state of the generator shared with the CPU."""
    torch.default_generator.set_state(new_state)


def empty_cache() -> None:
    """Counts the call. There is no cache: freed memory is given back at once, or when its recorded streams are done."""
    _C.empty_cache()


def memory_allocated(device: DeviceLike = None) -> int:
    """Returns the bytes of live tensors."""
    return _C.mem(_index(device))["allocated"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Returns the peak of memory_allocated since the last reset."""
    return _C.mem(_index(device))["peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Returns the bytes that cannot be allocated: live tensors, and freed ones that record_stream holds back."""
    return _C.mem(_index(device))["active"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Returns the peak of memory_reserved since the last reset."""
    return _C.mem(_index(device))["active_peak"]


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Starts both peaks again from what is in use now."""
    _C.reset_peaks(_index(device))


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Returns the free and the total bytes: of the cap, or of 64 GiB without one."""
    return _C.mem_get_info(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Returns the types that autocast may be asked for."""
    return [torch.float16, torch.bfloat16]


def get_device_properties(device: DeviceLike = None) -> types.SimpleNamespace:
    """Returns a device's name, memory and compute capability."""
    return types.SimpleNamespace(name="sim", total_memory=mem_get_info(device)[1], major=9, minor=0)


def get_device_name(device: DeviceLike = None) -> str:
    """Returns a device's name."""
    return "sim"


def is_bf16_supported(*_: Any, **__: Any) -> bool:
    """Whether bfloat16 works, which it does wherever the CPU has a kernel for it."""
    return True


# ---- the controls


def configure(
    mode: str | None = None, cap: int | None = None, device: int = 0, ndev: int | None = None, **settings: float
) -> None:
    """Changes settings; those not named stay as they are.

    Args:
        mode: "raise" makes a race an error where it happens; "poison" lists it in `races()` and lets a racing read
            see NaN; "off" checks nothing.
        cap: the bytes that `device` has; 0 takes the limit away.
        device: the device that `cap` is for.
        ndev: how many devices there are, from 1 to 8.
        **settings: `trace`, `fill`, `reuse_any_size` (0 or 1) and the clock's `flops`, `hbm`, `h2d`, `d2h`, `p2p`,
            `pageable` (per second), `launch`, `kernel_min`, `copy_lat`, `query` (seconds).
    """
    if mode is not None:
        if mode not in _MODES:
            raise ValueError(f"mode has to be one of {', '.join(_MODES)}, not {mode!r}")
        _C.set("mode", _MODES[mode])
    if ndev is not None:
        _C.set("ndev", ndev)
    if cap is not None:
        _C.set_cap(device, int(cap))
    for name, value in settings.items():
        _C.set(name, float(value))


def restore_settings() -> None:
    """Puts all settings and caps back to what they are after importing."""
    _C.restore_settings()


def reset() -> None:
    """Concludes everything in flight without complaint, clears races, counters and spans, sets the clock to zero."""
    _C.reset()


def races() -> list[str]:
    """Returns what was reported since the last reset."""
    return _C.races()


def counters() -> dict[str, int]:
    """Returns bytes and numbers of copies, kernels, allocations and host waits since the last reset."""
    return _C.counters()


def ops() -> dict[str, int]:
    """Returns how often each operator ran since the last reset."""
    return _C.ops()


def spans() -> list[tuple[str, str, str, float, float, int]]:
    """Returns (name, kind, stream, start, end, bytes) of each piece of work, recorded while `trace` is on."""
    return _C.spans()


def times() -> dict[str, float]:
    """Returns the virtual clock, in seconds: the total, the host's time, and how long each kind of engine was busy."""
    return _C.times()


def mem(device: DeviceLike = None) -> dict[str, int]:
    """Returns a device's memory figures, and those of pinned and registered host memory."""
    return _C.mem(_index(device))


def check_pending() -> tuple[int, int, int, int]:
    """Reports upload sources that were overwritten, without waiting for the copies.

    Returns:
        The numbers of pending uploads, pending downloads, uses of freed memory that may still be running, and freed
        blocks held back by record_stream.
    """
    return _C.check_pending()


def advance_host(seconds: float) -> None:
    """Lets the host spend some virtual time."""
    _C.advance_host(seconds)


def host_register(tensor: torch.Tensor) -> None:
    """Page-locks a dense CPU tensor's memory where it lies, as cudaHostRegister does."""
    _C.register_tensor(tensor)


def host_unregister(tensor: torch.Tensor) -> None:
    """Undoes host_register. A copy that may still be using the memory makes it an error."""
    _C.unregister_tensor(tensor)


def chrome_trace(path: str | os.PathLike[str]) -> None:
    """Writes the spans to a file that chrome://tracing and Perfetto can show."""
    micro = 1e6
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": lane,
            "ts": start * micro,
            "dur": (end - start) * micro,
            "args": {"bytes": size, "kind": kind},
        }
        for name, kind, lane, start, end, size in spans()
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(events, file)


def _patch_safetensors() -> None:
    """Lets safetensors load to `sim`, where it is installed."""
    try:
        from simdev.safetensors_shim import install
    except ImportError:
        return
    install()


torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_patch_safetensors()
