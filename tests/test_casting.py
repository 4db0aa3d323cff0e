"""diffusers' layerwise casting (fp8 storage), before layerwise offload and after it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, ModelHook, apply_layerwise_casting
from torch import nn

import factory
import models
from compatibility import Cell
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload

SLOW = pytest.mark.slow
FP8 = torch.float8_e4m3fn
MODES = [pytest.param(m, marks=() if m == "memory" else SLOW) for m in ("memory", "auto", "speed")]


def denoiser(pipe: DiffusionPipeline) -> Any:
    return getattr(pipe, "unet", None) or pipe.transformer


def cast(pipe: DiffusionPipeline) -> None:
    """The denoiser by its own method, a text encoder by the function. T5's own code casts what it computes to the dtype
    of `wo` as it is stored."""
    denoiser(pipe).enable_layerwise_casting(storage_dtype=FP8, compute_dtype=torch.float32)
    apply_layerwise_casting(
        pipe.text_encoder, FP8, torch.float32, skip_modules_pattern=("norm", "embed", "shared", "wo$")
    )


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["sd15", pytest.param("flux", marks=SLOW), pytest.param("wan", marks=SLOW)])
def test_fp8_storage(case: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    cell("Quantised weights", f"layerwise casting to fp8, {case}, {when}", "sim")
    reference, pipe = factory.CASES[case].build(), factory.CASES[case].build()
    cast(reference)
    if when == "before":
        cast(pipe)
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"residency": "lasting"})
    if when != "before":
        if when == "after a call":
            factory.run(case, pipe)
        cast(pipe)
    expected = factory.run(case, reference)
    for _ in range(3):
        assert torch.equal(factory.run(case, pipe), expected)
    assert handle.report().peak_seen <= handle.plan.peak_bytes
    handle.remove()
    assert torch.equal(factory.run(case, pipe), expected)
    assert any(p.dtype is FP8 for p in denoiser(pipe).parameters())


def cast_stack(module: nn.Module) -> nn.Module:
    apply_layerwise_casting(module, FP8, torch.float32, skip_modules_pattern=("norm",))
    return module


@pytest.mark.parametrize("device", ["sim", "cpu"])
@pytest.mark.parametrize("mode", ["memory", "auto", "speed"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bare_module_whose_next_groups_are_on_their_way(when: str, mode: str, device: str, sim: ModuleType) -> None:
    module, reference = models.make(models.MlpStack), cast_stack(models.make(models.MlpStack))
    if when == "before":
        cast_stack(module)
    budget = None if mode == "memory" else 60_000
    handle = apply_layerwise_offload(module, mode, onload_device=device, memory_budget=budget)
    if when == "after":
        models.run(module, models.numbers(2, models.WIDTH))
        cast_stack(module)
    for seed in range(4):
        x = models.numbers(2, models.WIDTH, seed=seed)
        assert torch.equal(models.run(module, x), models.run(reference, x))
    handle.remove()
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert torch.equal(models.run(module, x), models.run(reference, x))


def test_casts_are_never_copied_back_and_residents_stay(sim: ModuleType) -> None:
    module = cast_stack(models.make(models.MlpStack))
    apply_layerwise_offload(module, "speed", onload_device="sim")
    x = models.numbers(2, models.WIDTH)
    for _ in range(3):
        models.run(module, x)
    before = sim.counters()
    x = x.to("sim")
    with torch.no_grad():
        module(x)
    after = sim.counters()
    assert after["d2h_bytes"] == before["d2h_bytes"]
    assert after["h2d_bytes"] - before["h2d_bytes"] <= x.numel() * x.element_size()


def test_a_quarter_of_the_bytes_travels(sim: ModuleType) -> None:
    moved = {}
    for kind in ("fp32", "fp8"):
        module = models.make(models.MlpStack)
        if kind == "fp8":
            cast_stack(module)
        handle = apply_layerwise_offload(module, "memory", onload_device="sim")
        x = models.numbers(2, models.WIDTH)
        for _ in range(3):
            models.run(module, x)
        before = handle._runtime.transfer.moved_bytes
        models.run(module, x)
        moved[kind] = handle._runtime.transfer.moved_bytes - before
        handle.remove()
    assert moved["fp8"] < moved["fp32"] / 3


def test_casting_a_component_as_a_whole_is_refused_by_name(sim: ModuleType, cell: Cell) -> None:
    cell("Quantised weights", "layerwise casting of a whole component at once", "sim", "refused")
    pipe = factory.CASES["sd15"].build()
    apply_layerwise_casting(pipe.unet, FP8, torch.float32, skip_modules_pattern=None)
    with pytest.raises(LayerwiseOffloadError, match=r"'unet' can't be streamed: layerwise casting converts it"):
        pipe.enable_layerwise_offload(mode="memory", onload_device="sim")


class Doubling(ModelHook):
    """A hook of diffusers' that shows in the result."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 2 * output


@pytest.mark.parametrize("path", ["blocks.1.up", "blocks.1", ""])
def test_a_hook_of_diffusers_comes_and_goes_beside_ours(path: str, sim: ModuleType) -> None:
    module, plain = models.make(models.MlpStack), models.make(models.MlpStack)
    twice = models.make(models.MlpStack)
    HookRegistry.check_if_exists_or_initialize(twice.get_submodule(path)).register_hook(Doubling(), "twice")
    x = models.numbers(2, models.WIDTH)
    handle = apply_layerwise_offload(module, "memory", onload_device="sim")
    registry = HookRegistry.check_if_exists_or_initialize(module.get_submodule(path))
    for _ in range(2):
        assert torch.equal(models.run(module, x), models.run(plain, x))
        registry.register_hook(Doubling(), "twice")
        assert torch.equal(models.run(module, x), models.run(twice, x))
        registry.remove_hook("twice")
    assert torch.equal(models.run(module, x), models.run(plain, x))
    registry.register_hook(Doubling(), "twice")
    handle.remove()
    assert torch.equal(models.run(module, x), models.run(twice, x))
    registry.remove_hook("twice")
    assert torch.equal(models.run(module, x), models.run(plain, x))
