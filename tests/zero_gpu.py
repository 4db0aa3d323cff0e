"""A stand-in for what ZeroGPU does to a process: faked devices in the parent, a forked worker, a thread for each call.

As in the `spaces` package, the parent is told of a device with made-up memory and may not use it: what reaches a
device raises. A worker is forked, sees the device as it is, and runs each call in a new thread. Results are pickled.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 120
#: What the parent is told, free and in all. No device here has as much.
TOLD = (74_625_056_768, 74_625_056_768)
FAKED: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_initialized": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "mem_get_info": lambda *_: TOLD,
    "get_device_name": lambda *_: "made up",
    "empty_cache": lambda: None,  # of CUDA: nothing, before the device is initialised; loaders call it
}
FORBIDDEN = """init _lazy_init synchronize set_device stream set_stream current_stream default_stream
    memory_allocated max_memory_allocated memory_reserved reset_peak_memory_stats get_rng_state set_rng_state
    manual_seed_all host_register""".split()


class DeviceReached(RuntimeError):
    """The parent used the device."""


def refuse(what: str) -> Callable[..., Any]:
    """A function that may not be called."""

    def reached(*_: Any, **__: Any) -> Any:
        raise DeviceReached(f"{what} was called in a process that may not use a device")

    return reached


class _NoDevice(TorchDispatchMode):
    """No operation takes or makes a tensor on a device. Like ZeroGPU's modes, for the thread that enters it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices += [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
        if any(device.type not in ("cpu", "meta") for device in devices):
            refuse(str(func))()
        return func(*args, **kwargs)


@contextmanager
def parent(device: ModuleType) -> Iterator[Callable[[], None]]:
    """A process under ZeroGPU. Gives what a worker has to call first: it puts everything back."""
    patch, mode = pytest.MonkeyPatch(), _NoDevice()
    for name, fake in FAKED.items():
        patch.setattr(device, name, fake)
    for name in FORBIDDEN:
        patch.setattr(device, name, refuse(name), raising=False)
    for name in ("Stream", "Event"):
        patch.setattr(torch, name, type(name, (getattr(torch, name),), {"__new__": refuse(name)}))
    patch.setattr(torch.Tensor, "pin_memory", refuse("pin_memory"))
    mode.__enter__()

    def unpatch() -> None:
        mode.__exit__(None, None, None)
        patch.undo()

    try:
        yield unpatch
    finally:
        unpatch()


class Worker:
    """A forked process that runs calls, each in a new thread, until it is stopped."""

    def __init__(self, start: Callable[[], None], task: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, start, task), daemon=True)
        self._process.start()

    def call(self, *args: Any) -> Any:
        """One request's result; raises what the task raised, as text."""
        self._ours.send(args)
        assert self._ours.poll(PATIENCE), "the worker hangs"
        found = self._ours.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _serve(connection: Any, start: Callable[[], None], task: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    start()
    while True:
        args = connection.recv()
        found: list[Any] = []

        def run(args: Any = args, found: list[Any] = found) -> None:
            try:
                found.append(task(*args))
            except Exception as error:
                found.append(RuntimeError(f"{type(error).__name__}: {error}"))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        connection.send(found[0])
