"""diffusers' caches and switches of models beside ours: before enabling and after it, and taken off in both orders."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

import diffusers_layerwise  # noqa: F401
import factory
from compatibility import Cell

TABLE = "Caches and switches of models"
STEPS = 6
SLOW = pytest.mark.slow
MODES = ["memory", "auto"]
Switch = Callable[[DiffusionPipeline], Any]


def first_block(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))


def taylor(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32)
    )


def taylor_lite(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, use_lite_mode=True)
    )


def mag(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        MagCacheConfig(threshold=0.5, max_skip_steps=1, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS)
    )


def faster(pipe: DiffusionPipeline) -> None:
    distilled = "Flux" in type(pipe).__name__
    pipe.transformer.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 900),
            unconditional_batch_skip_range=2,
            unconditional_batch_timestep_skip_range=(-1, 900),
            current_timestep_callback=lambda: pipe.current_timestep,
            tensor_format="BFCHW",
            is_guidance_distilled=distilled,
        )
    )


def pyramid(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 950),
            current_timestep_callback=lambda: pipe.current_timestep,
        )
    )


CACHES: dict[str, Switch] = {
    "FirstBlockCache": first_block,
    "TaylorSeer": taylor,
    "TaylorSeer, lite": taylor_lite,
    "MagCache": mag,
    "FasterCache": faster,
    "PyramidAttentionBroadcast": pyramid,
}
CASES = {"FasterCache, CogVideoX": ("cogvideox", faster), "FirstBlockCache, Wan": ("wan", first_block)}
CASES |= {name: ("flux", switch) for name, switch in CACHES.items()}


def run(case: str, pipe: DiffusionPipeline, seed: int = 0) -> torch.Tensor:
    return factory.run(case, pipe, seed, num_inference_steps=STEPS)


def plan_options(mode: str) -> dict[str, Any]:
    return {"mode": mode, "onload_device": "sim"} | ({"memory_budget": 400_000} if mode == "auto" else {})


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_cache_and_layerwise_offload_in_either_order(
    name: str, mode: str, when: str, sim: ModuleType, cell: Cell
) -> None:
    cell(TABLE, name, f"{mode}, {'before' if when == 'before' else 'after'} ours")
    case, switch = CASES[name]
    reference, pipe = factory.CASES[case].build(), factory.CASES[case].build()
    plain = run(case, reference)
    switch(reference)
    if when == "before":
        switch(pipe)
    handle = pipe.enable_layerwise_offload(**plan_options(mode))
    if when != "before":
        if when == "after a call":
            assert torch.equal(run(case, pipe), plain)
        switch(pipe)
    for seed in (0, 1):
        assert torch.equal(run(case, pipe, seed), run(case, reference, seed))
    assert handle.report().peak_seen <= handle.plan.peak_bytes
