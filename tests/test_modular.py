"""diffusers' modular pipelines: components that are loaded later, and the manager that holds them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import ComponentsManager
from diffusers.modular_pipelines.flux import FluxAutoBlocks

import diffusers_layerwise
import factory


def parts() -> dict[str, Any]:
    """The components of a tiny Flux."""
    return {name: value for name, value in factory.CASES["flux"].build().components.items() if value is not None}


def make(manager: ComponentsManager | None = None) -> Any:
    """A modular pipeline without components."""
    pipe = FluxAutoBlocks().init_pipeline(components_manager=manager)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def fill(pipe: Any) -> Any:
    pipe.update_components(**{name: value for name, value in parts().items() if name in pipe.component_names})
    return pipe


def run(pipe: Any) -> torch.Tensor:
    result = pipe(
        prompt="a fox",
        height=16,
        width=16,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=16,
        output="images",
        output_type="pt",
    )
    assert isinstance(result, torch.Tensor)
    return result.cpu()


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return run(fill(make()))


@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_components_loaded_before_or_after_enabling(
    order: str, mode: str, sim: ModuleType, expected: torch.Tensor
) -> None:
    pipe = make()
    if order == "before":
        fill(pipe)
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
    if order == "after":
        fill(pipe)
    assert {c.name for c in handle.report().components} == {"text_encoder", "text_encoder_2", "vae", "transformer"}
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    assert handle.report().peak_seen <= handle.plan.peak_bytes
    assert str(pipe.device) == str(pipe._execution_device) == "sim:0"
    pipe.disable_layerwise_offload()
    assert pipe.layerwise_offload is None
    assert torch.equal(run(pipe), expected)


def test_moving_and_swapping(sim: ModuleType, expected: torch.Tensor) -> None:
    pipe = fill(make())
    diffusers_layerwise.enable_layerwise_offload(pipe, ["transformer"], "memory", onload_device="sim")
    assert torch.equal(run(pipe), expected)
    pipe.to("cpu")
    assert torch.equal(run(pipe), expected)
    pipe.to("sim")
    pipe.update_components(transformer=parts()["transformer"])
    assert torch.equal(run(pipe), expected)
    diffusers_layerwise.disable_layerwise_offload(pipe)
    assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize("order", ["manager first", "ours first"])
def test_components_manager_keeps_what_is_not_ours(order: str, sim: ModuleType, expected: torch.Tensor) -> None:
    manager = ComponentsManager()
    pipe = fill(make(manager))
    if order == "manager first":
        manager.enable_auto_cpu_offload(device="sim")
    handle = pipe.enable_layerwise_offload(["transformer"], "memory", onload_device="sim")
    if order == "ours first":
        manager.enable_auto_cpu_offload(device="sim")
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    assert "transformer" in {c.name for c in handle.report().components if c.choice == "layerwise"}
    manager.disable_auto_cpu_offload()
    pipe.disable_layerwise_offload()
    assert torch.equal(run(pipe), expected)
