"""The claims that only a real accelerator can show: run with `pytest -m gpu` on a machine that has one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import diffusers_layerwise as dl

pytestmark = pytest.mark.gpu

WIDTH, DEPTH = 1024, 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().to(torch.bfloat16).eval().requires_grad_(False)


def weights(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize(("mode", "share"), [("memory", None), ("auto", 0.4), ("speed", 0.7), ("auto", 2.0)])
def test_streamed_output_is_bit_identical_to_resident(
    stack: Stack, device: torch.device, mode: str, share: float | None
) -> None:
    x = torch.randn(256, WIDTH, dtype=torch.bfloat16, device=device)
    expected = stack.to(device)(x)
    stack.to("cpu")
    budget = None if share is None else int(share * weights(stack))
    with dl.apply_layerwise_offload(stack, mode, onload_device=device, memory_budget=budget) as handle:
        for _ in range(5):
            assert torch.equal(stack(x), expected)
        assert handle.report().peak_seen <= handle.plan.peak_bytes


def test_allocated_memory_is_the_plan_plus_activations(stack: Stack, device: torch.device) -> None:
    x = torch.randn(256, WIDTH, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    with dl.apply_layerwise_offload(stack, "memory", onload_device=device) as handle:
        for _ in range(3):
            stack(x)
        # Between passes only the plan's bytes are held; the allocator rounds each buffer up to 512 bytes.
        held = torch.cuda.memory_allocated(device) - before
        buffers = 2 + len(handle.plan.components)
        assert handle.plan.peak_bytes <= held <= handle.plan.peak_bytes + 512 * buffers
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(device) == before


def test_steady_state_neither_synchronises_nor_allocates_for_weights(stack: Stack, device: torch.device) -> None:
    x = torch.randn(256, WIDTH, dtype=torch.bfloat16, device=device)
    with dl.apply_layerwise_offload(stack, "memory", onload_device=device):
        for _ in range(4):
            stack(x)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                stack(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated(device) == held


def test_host_copy_is_pinned_at_its_exact_size_and_given_back(stack: Stack, device: torch.device) -> None:
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16, device=device)
    handle = dl.apply_layerwise_offload(stack, "memory", onload_device=device)
    for _ in range(3):
        stack(x)
    report = handle.report().components[0]
    assert report.pinned_bytes <= 1.01 * weights(stack)
    assert stack.blocks[3].up.weight.is_pinned()
    handle.remove()
    assert not stack.blocks[3].up.weight.is_pinned()


def test_a_pass_on_another_stream_is_ordered(stack: Stack, device: torch.device) -> None:
    x = torch.randn(256, WIDTH, dtype=torch.bfloat16, device=device)
    expected = stack.to(device)(x)
    stack.to("cpu")
    torch.cuda.synchronize()
    with dl.apply_layerwise_offload(stack, "speed", onload_device=device, memory_budget=int(0.5 * weights(stack))):
        for _ in range(6):
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream())
            torch.accelerator.set_stream(stream)
            assert torch.equal(stack(x), expected)
