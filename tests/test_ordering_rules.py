"""Rules of order that only show in rare sequences: what was prefetched and is dropped unused."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

import diffusers_layerwise as dl

WIDTH = 64


class Steps(nn.Module):
    """A chain of equal layers of which some can be skipped."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = layer(x)
        return x


class Broken(RuntimeError):
    pass


def fail(*_: object) -> None:
    raise Broken


def test_a_resident_group_dropped_before_its_use_is_not_reused_while_its_copy_runs(sim: ModuleType) -> None:
    model, x = Steps().eval().requires_grad_(False), torch.randn(3, WIDTH)
    expected = model(x)
    config = {"group_size": "16KiB", "resident": 1.0, "prefetch": 1}
    with dl.apply_layerwise_offload(model, "manual", onload_device="sim", config=config) as handle:
        for _ in range(4):
            assert torch.equal(model(x).cpu(), expected)
        for _ in range(2):
            hook = model.layers[0].register_forward_pre_hook(fail)
            # With nothing on the device the next pass queues all residents, and fails before it uses them.
            handle.release()
            sim.synchronize()
            with pytest.raises(Broken):
                model(x)
            torch.empty(WIDTH * WIDTH * 4 + 1024, dtype=torch.uint8, device="sim").zero_()
            hook.remove()
            assert torch.equal(model(x).cpu(), expected)


def test_a_skipped_group_gives_its_slot_back_at_once(sim: ModuleType) -> None:
    model, x = Steps().eval().requires_grad_(False), torch.randn(3, WIDTH)
    config = {"group_size": "16KiB", "prefetch": 2}
    with dl.apply_layerwise_offload(model, "manual", onload_device="sim", config=config):
        for _ in range(4):
            model(x)
        model.skipped = {2}
        transfer = model._hf_hook.runtime.transfer
        transfer.log = []
        model(x)
        events = [(what, name.split(".")[-1]) for what, name in transfer.log]
        dropped, used = events.index(("free", "2")), events.index(("ready", "3"))
        assert ("ready", "2") not in events
        assert dropped < used
