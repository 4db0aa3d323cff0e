"""A VAE that works tile by tile uses its layers many times in one pass: what fits isn't loaded for each tile."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import factory


def build() -> Any:
    pipe = factory.CASES["sd15"].build()
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size = 16
    pipe.vae.tile_latent_min_size = pipe.vae.config.sample_size // 4
    return pipe


def moved(handle: Any) -> int:
    return next(c.moved_bytes for c in handle.report().components if c.name == "vae")


SIZE = {"height": 64, "width": 64}


def tiles(pipe: Any) -> int:
    """How often a call of the pipeline runs the VAE's decoder."""
    count = 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1

    handle = pipe.vae.decoder.conv_in.register_forward_pre_hook(hook)
    factory.run("sd15", pipe, **SIZE)
    handle.remove()
    return count


@pytest.mark.parametrize("mode", ["auto", "speed"])
def test_tiles_do_not_load_what_fits_again(mode: str, sim: ModuleType) -> None:
    stock = build()
    assert tiles(stock) >= 4
    expected = factory.run("sd15", stock, **SIZE)
    pipe = build()
    weights = sum(p.numel() * p.element_size() for p in pipe.vae.parameters())
    largest = sum(p.numel() * p.element_size() for p in pipe.unet.parameters())
    budget = largest // 2 + 2 * weights
    handle = pipe.enable_layerwise_offload(
        mode=mode, onload_device="sim", memory_budget=budget, config={"activation_reserve": 0}
    )
    assert torch.equal(factory.run("sd15", pipe, **SIZE), expected)
    first = moved(handle)
    assert first <= 2.2 * weights, "in the first call a layer shows at its second use that it repeats"
    assert torch.equal(factory.run("sd15", pipe, **SIZE), expected)
    assert moved(handle) - first <= 1.1 * weights
    assert handle.report().peak_ever <= budget


def test_without_room_every_tile_streams_and_the_image_is_right(sim: ModuleType) -> None:
    stock = build()
    expected = factory.run("sd15", stock, **SIZE)
    pipe = build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    for _ in range(2):
        assert torch.equal(factory.run("sd15", pipe, **SIZE), expected)
        assert handle.report().peak_seen <= handle.plan.peak_bytes
