"""The one file that knows backends by name: page-locking host memory in place, and what a device can tell.

Everything else goes through `torch.accelerator`, `torch.get_device_module`, `torch.Stream` and `torch.Event`.
"""

from __future__ import annotations

import dataclasses
import os

import torch

from .errors import LayerwiseOffloadError, how_to_end


@dataclasses.dataclass(frozen=True)
class StreamingDefault:
    """Whether a platform streams when nobody says anything, and why."""

    is_on: bool
    reason: str

    def __str__(self) -> str:
        return f"streaming is {'on' if self.is_on else 'off'} by default: {self.reason}"


def default_device() -> torch.device:
    """The execution device when the user names none: the accelerator if there is one, else the CPU."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return indexed(found)
    return torch.device("cpu")


def indexed(device: torch.device) -> torch.device:
    """Adds the index that `device` means without one, and initialises nothing (before use the current one is 0)."""
    if device.type == "cpu" or device.index is not None:
        return torch.device(device.type) if device.type == "cpu" else device
    module = torch.get_device_module(device)
    ready = getattr(module, "is_initialized", lambda: True)()
    return torch.device(device.type, getattr(module, "current_device", int)() if ready else 0)


def refuse_absent(device: torch.device, what: str) -> None:
    """Refuses a device on which this build of torch can't compute.

    Asks no device: whether there is one, and of that index, shows at its first use.

    Raises:
        ValueError: It is such a device; the message begins with `what` isn't possible.
    """
    built = torch.accelerator.current_accelerator()
    if device.type == "cpu" or (built is not None and built.type == device.type):
        return
    if built is None:
        raise ValueError(
            f"{what}: torch {torch.__version__} is built for no accelerator. Install torch for yours "
            f"(pytorch.org/get-started), or use 'cpu'."
        )
    raise ValueError(
        f"{what}: the accelerator of torch {torch.__version__} is {built.type!r} here. Use {built.type!r} or 'cpu'."
    )


def new_stream(device: torch.device) -> torch.Stream:
    """A stream of a device, whose first use that may be.

    Raises:
        LayerwiseOffloadError: The device isn't there.
    """
    try:
        return torch.Stream(device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        raise LayerwiseOffloadError(
            f"{device} can't be used: {str(error).strip().splitlines()[0]}. Nothing was loaded. Call "
            f"{how_to_end(False)}, or {how_to_end(True)}, then enable with an onload_device that is there."
        ) from error


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated: what the driver reports free and what torch's allocator holds unused.

    None for the CPU and for backends that don't say.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free = int(module.mem_get_info(device)[0])
    if hasattr(module, "memory_reserved") and hasattr(module, "memory_allocated"):
        free += max(0, int(module.memory_reserved(device)) - int(module.memory_allocated(device)))
    return free


def memory_counters(device: torch.device) -> tuple[int, int] | None:
    """(bytes of live tensors, the most since the allocator's statistics were last reset), which this never does.

    None for the CPU and for backends whose allocator doesn't say.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is None:
        return None
    if hasattr(module, "memory_stats"):
        # One look for both: each builds a dictionary of all statistics.
        found = module.memory_stats(device)
        keys = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
        if all(key in found for key in keys):
            return int(found[keys[0]]), int(found[keys[1]])
    if hasattr(module, "memory_allocated") and hasattr(module, "max_memory_allocated"):
        return int(module.memory_allocated(device)), int(module.max_memory_allocated(device))
    return None


def streaming_default(device: torch.device) -> StreamingDefault:
    """Whether a device streams by default in mode `"auto"`. May ask the driver: for the first use, not before."""
    kind = device.type
    if kind == "cpu":
        return StreamingDefault(True, "a CPU reads what its memory can't hold, and uses the rest where it is")
    if kind == "cuda" and torch.version.hip is not None:
        return StreamingDefault(False, "copies that overlap with compute aren't proved on ROCm")
    if kind == "npu":
        return StreamingDefault(False, "copies that overlap with compute aren't proved on NPUs")
    if kind == "mps" or _shares_memory(device):
        return StreamingDefault(False, f"{device} shares the host's memory, so that offloading saves none")
    if kind in ("cuda", "xpu"):
        return StreamingDefault(True, "copies from page-locked memory overlap with compute")
    return StreamingDefault(True, f"nothing is known against it on {kind!r} devices")


def _shares_memory(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):
        return False
    return bool(getattr(module.get_device_properties(device), "is_integrated", False))


def empty_cache(device: torch.device) -> None:
    """Gives memory that torch's allocator keeps unused back to the device. Slow: for when memory ran out."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()


def rng_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's random numbers; None for the CPU and for devices without any."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is None or not hasattr(module, "get_rng_state"):
        return None
    found: torch.Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return found


def set_rng_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Puts back what [`rng_state`] returned."""
    if state is not None:
        module = torch.get_device_module(device)
        module.set_rng_state(state) if device.type == "mps" else module.set_rng_state(state, device)


def device_name(device: torch.device) -> str:
    """What a driver calls a device; its type where it says nothing."""
    if device.type == "cpu":
        return device.type
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def total_memory(device: torch.device) -> int | None:
    """Bytes that a device has, as its driver says; None for the CPU and for backends that don't say."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return int(module.mem_get_info(device)[1]) if module is not None and hasattr(module, "mem_get_info") else None


def host_memory() -> int:
    """Bytes of the host's memory; 0 where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def can_pin_in_place(device: torch.device) -> bool:
    """Whether memory that is allocated already can be page-locked where it is (CUDA and ROCm)."""
    return device.type == "cuda"


def pin_in_place(buffer: torch.Tensor) -> None:
    """Page-locks a CPU tensor's memory at its exact size.

    torch's own pinned pool rounds each block up to a power of two, up to 1.78 times the bytes of real checkpoints.

    Raises:
        RuntimeError: The driver refused (not enough lockable memory).
    """
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {buffer.numel()} bytes failed with error {int(status)}")


def unpin_in_place(pointer: int) -> None:
    """Undoes [`pin_in_place`]; must run before the memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]


def try_pinning(device: torch.device, count: int = 1 << 20) -> str | None:
    """Page-locks a little memory for a device and lets go of it again. Returns why it fails, or None where it works."""
    try:
        if can_pin_in_place(device):
            probe = torch.empty(count, dtype=torch.uint8)
            pin_in_place(probe)
            unpin_in_place(probe.data_ptr())
        else:
            new_pinned(count, device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None


def new_pinned(count: int, device: torch.device) -> torch.Tensor:
    """`count` bytes of page-locked CPU memory for a device that can't lock memory in place."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)
