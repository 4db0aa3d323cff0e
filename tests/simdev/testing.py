"""What tests of and on the simulated device share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import simdev as sim

SIZE = 64 * 64 * 4  # the bytes of a 64 x 64 tensor of float32, which is what most tests use


@contextlib.contextmanager
def fresh_device() -> Iterator[None]:
    """Starts with default settings, nothing in flight and a clock at zero, and leaves no trace.

    For an autouse fixture. Whatever a test leaves behind, races included, does not reach the next one.
    """
    sim.restore_settings()
    sim.reset()
    try:
        yield
    finally:
        sim.configure(mode="off")
        sim.restore_settings()
        sim.reset()


def pinned(*shape: int) -> torch.Tensor:
    """Returns random numbers in pinned memory."""
    return torch.randn(*shape).pin_memory()


def on_device(*shape: int, device: str = "sim") -> torch.Tensor:
    """Returns ones on the device, with the host having waited for them."""
    tensor = torch.ones(*shape, device=device)
    sim.synchronize(tensor.device)
    return tensor


def upload(source: torch.Tensor, stream: torch.Stream) -> torch.Tensor:
    """Copies to the device on a side stream, and waits for nothing."""
    with sim.stream(stream):
        return source.to("sim", non_blocking=True)
