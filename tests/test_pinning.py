"""Page-locking in place, with a driver that is a list: when, how much, and what happens when it refuses."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest
import torch

import models
from diffusers_layerwise import host, platform
from models import numbers, run

WIDTH = 64


class Driver:
    """Stands for the platform's calls: keeps what is locked, and may refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.locked: dict[int, int] = {}
        self.most = 0
        self.limit = 1 << 40
        monkeypatch.setattr(platform, "can_pin_in_place", lambda device: device.type != "cpu")
        monkeypatch.setattr(platform, "pin_in_place", self.pin)
        monkeypatch.setattr(platform, "unpin_in_place", self.unpin)

    def pin(self, buffer: torch.Tensor) -> None:
        """Locks."""
        if sum(self.locked.values()) + buffer.numel() > self.limit:
            raise RuntimeError("the driver refused")
        assert buffer.data_ptr() not in self.locked
        self.locked[buffer.data_ptr()] = buffer.numel()
        self.most = max(self.most, sum(self.locked.values()))

    def unpin(self, pointer: int) -> None:
        """Unlocks."""
        del self.locked[pointer]


@pytest.fixture
def driver(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver that locks in place."""
    return Driver(monkeypatch)


def weights(module: torch.nn.Module) -> int:
    """Bytes of parameters."""
    return sum(p.nbytes for p in module.parameters())


def test_host_memory_is_locked_at_its_true_size_after_the_first_pass_and_unlocked_at_the_end(driver: Driver) -> None:
    module = models.make(models.Chain, 6, WIDTH)
    expected = run(module, numbers(2, WIDTH))
    handle = models.stream(module)
    assert driver.locked == {}
    for _ in range(3):
        assert torch.equal(run(module, numbers(2, WIDTH)), expected)
    assert 0.9 * weights(module) < sum(driver.locked.values()) <= 1.05 * weights(module) + 4096
    handle.remove()
    gc.collect()
    assert driver.locked == {}


def test_released_handles_lock_nothing_until_the_next_pass(driver: Driver) -> None:
    module = models.make(models.Chain, 6, WIDTH)
    expected = run(module, numbers(2, WIDTH))
    handle = models.stream(module)
    for _ in range(3):
        run(module, numbers(2, WIDTH))
    before = sum(driver.locked.values())
    for _ in range(2):
        handle.release()
        handle.release()
        assert driver.locked == {}
        assert handle.report().components[0].pinned_bytes == 0
        assert torch.equal(run(module, numbers(2, WIDTH)), expected)
        assert sum(driver.locked.values()) == before
    handle.remove()


def test_memory_is_unlocked_before_it_is_freed(driver: Driver) -> None:
    module = models.make(models.Chain, 6, WIDTH)
    models.stream(module)
    for _ in range(3):
        run(module, numbers(2, WIDTH))
    assert driver.locked
    del module
    gc.collect()
    assert driver.locked == {}


@pytest.mark.parametrize("limit", [0, 40_000_000])
def test_what_cannot_be_locked_is_copied_through_a_small_ring_and_a_note_says_so(
    driver: Driver, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CHUNK_BYTES", 20_000)
    driver.limit = limit
    module = models.make(models.Chain, 6, WIDTH)
    expected = run(module, numbers(2, WIDTH))
    handle = models.stream(module)
    for _ in range(4):
        assert torch.equal(run(module, numbers(2, WIDTH)), expected)
    notes = " ".join(handle.report().components[0].notes)
    assert ("through a small page-locked ring: the driver refused" in notes) == (limit == 0)
    module.blocks[2].lin.weight.data += 1
    plain = models.make(models.Chain, 6, WIDTH)
    plain.blocks[2].lin.weight.data += 1
    assert torch.equal(run(module, numbers(2, WIDTH)), run(plain, numbers(2, WIDTH)))
    handle.remove()
    gc.collect()
    assert driver.locked == {}
