"""Training by accident: gradients and train mode on a component that streams are refused by name."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import factory
import models
from compatibility import Cell
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload

MODES = ["memory", "auto", "speed"]


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_requires_gradients(mode: str, sim: ModuleType, cell: Cell) -> None:
    cell("Training", "an input requires gradients", "refused where gradients are enabled", "refused")
    module = models.make(models.MlpStack).requires_grad_(False)
    reference = models.make(models.MlpStack)
    apply_layerwise_offload(module, mode, onload_device="sim")
    x = models.numbers(2, models.WIDTH).requires_grad_()
    with pytest.raises(LayerwiseOffloadError, match=r"'MlpStack' .* gradients enabled while an input require them"):
        module(x)
    assert torch.equal(models.run(module, x), models.run(reference, x))


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_require_gradients(mode: str, sim: ModuleType, cell: Cell) -> None:
    cell("Training", "weights require gradients", "refused where gradients are enabled", "refused")
    module = models.make(models.MlpStack)
    apply_layerwise_offload(module, mode, onload_device="sim")
    x = models.numbers(2, models.WIDTH)
    with pytest.raises(LayerwiseOffloadError, match=r"its weights require them.* \(handle.remove\(\)\) to train"):
        module(x)
    assert torch.equal(models.run(module, x), models.run(models.make(models.MlpStack), x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gradients", [False, True])
def test_train_mode(gradients: bool, mode: str, sim: ModuleType, cell: Cell) -> None:
    cell("Training", "train mode", "refused where gradients are enabled", "refused")
    cell("Training", "train mode", "refused under no_grad", "refused")
    pipe = factory.CASES["sd15"].build()
    pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
    expected = factory.run("sd15", factory.CASES["sd15"].build())
    pipe.unet.train()
    with pytest.raises(LayerwiseOffloadError, match=r"'unet' .* is in train mode\. Put it into eval mode"):
        factory.run("sd15", pipe)
    with torch.set_grad_enabled(gradients), pytest.raises(LayerwiseOffloadError, match="train mode"):
        pipe.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 4, 32))
    pipe.unet.eval()
    assert torch.equal(factory.run("sd15", pipe), expected)


def test_parts_that_are_called_by_themselves(sim: ModuleType, cell: Cell) -> None:
    """A VAE's `decode` and a block have no root that sees their inputs."""
    cell("Training", "a part that is called by itself", "refused where gradients are enabled", "refused")
    pipe = factory.CASES["sd15"].build()
    for module in factory.modules_of(pipe).values():
        module.requires_grad_(False)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    latents = models.numbers(1, 4, 8, 8)
    with pytest.raises(LayerwiseOffloadError, match=r"'vae' .* an input require them"):
        pipe.vae.decode(latents.clone().requires_grad_())
    layer = pipe.unet.conv_in
    with pytest.raises(LayerwiseOffloadError, match=r"'unet' .* an input require them"):
        layer(latents.clone().requires_grad_())
    layer.weight.requires_grad_(True)
    with pytest.raises(LayerwiseOffloadError, match=r"'unet' .* its weights require them"):
        layer(latents)
    expected = factory.run("sd15", factory.CASES["sd15"].build())
    assert torch.equal(factory.run("sd15", pipe), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ["memory", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["sd15", pytest.param("flux", marks=pytest.mark.slow)])
def test_gradient_checkpointing_is_harmless(case: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    cell("Training", f"enable_gradient_checkpointing(), {case}", f"{mode}, {when}")

    def checkpoint(pipe: Any) -> None:
        for module in factory.modules_of(pipe).values():
            if getattr(module, "_supports_gradient_checkpointing", False):
                module.enable_gradient_checkpointing()
            elif getattr(module, "supports_gradient_checkpointing", False):
                module.gradient_checkpointing_enable()

    expected = factory.run(case, factory.CASES[case].build())
    pipe = factory.CASES[case].build()
    if when == "before":
        checkpoint(pipe)
    pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
    if when == "after":
        factory.run(case, pipe)
        checkpoint(pipe)
    for _ in range(2):
        assert torch.equal(factory.run(case, pipe), expected)


def test_checkpointing_with_gradients_enabled_that_nothing_requires(sim: ModuleType) -> None:
    """diffusers then runs its blocks through `torch.utils.checkpoint`."""
    unet, reference = (factory.CASES["sd15"].build().unet.requires_grad_(False) for _ in range(2))
    unet.enable_gradient_checkpointing()
    apply_layerwise_offload(unet, "memory", onload_device="sim")
    inputs = models.numbers(1, 4, 8, 8), 1, models.numbers(1, 4, 32)
    with torch.enable_grad():
        for _ in range(2):
            assert torch.equal(unet(*inputs).sample.cpu(), reference(*inputs).sample)
