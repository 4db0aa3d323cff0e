"""The execution device needn't be the current one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import diffusers_layerwise as dl
import factory
import models


@pytest.fixture
def two(sim: ModuleType) -> Iterator[ModuleType]:
    """Two simulated devices, the first one current."""
    gc.collect()  # what earlier tests left in cycles would go at any time, and is counted
    sim.configure(ndev=2)
    sim.set_device(0)
    yield sim
    sim.set_device(0)


WAYS = [{"mode": "memory"}, {"mode": "manual", "config": {"resident": 2}}, {"mode": "speed"}]


@pytest.mark.parametrize("options", WAYS)
def test_a_module_runs_on_a_device_that_is_not_the_current_one(two: ModuleType, options: dict[str, object]) -> None:
    module = models.make(models.STACKS["mlp_stack"])
    x = models.numbers(3, models.WIDTH)
    before = two.mem(0)["allocated"]
    with torch.no_grad():
        expected = module(x)
        with dl.apply_layerwise_offload(module, onload_device="sim:1", **options) as handle:  # type: ignore[arg-type]
            for _ in range(5):
                y = module(x)
                assert y.device == torch.device("sim:1")
                assert torch.equal(y.cpu(), expected)
            assert two.mem(0)["allocated"] == before
            assert two.current_device() == 0
            assert handle.report().device == "sim:1"


def test_two_modules_run_on_two_devices_in_turn(two: ModuleType) -> None:
    first, second = (models.make(models.STACKS["mlp_stack"]) for _ in range(2))
    x = models.numbers(3, models.WIDTH)
    with torch.no_grad():
        expected = second(first(x))
        with (
            dl.apply_layerwise_offload(first, "memory", onload_device="sim:0"),
            dl.apply_layerwise_offload(second, "memory", onload_device="sim:1"),
        ):
            for _ in range(4):
                assert torch.equal(second(first(x)).cpu(), expected)


# ---- entry points other than a component's forward, with inputs that are still on the host
ENTRIES = {
    "vae.decode": lambda pipe: pipe.vae.decode(torch.ones(1, 4, 8, 8)).sample,
    "vae.encode": lambda pipe: pipe.vae.encode(torch.ones(1, 3, 32, 32)).latent_dist.mean,
    "vae.decoder": lambda pipe: pipe.vae.decoder(torch.ones(1, 4, 8, 8)),
    "get_input_embeddings": lambda pipe: pipe.text_encoder.get_input_embeddings()(torch.tensor([[1, 2]])),
    "text_encoder, a layer": lambda pipe: pipe.text_encoder.final_layer_norm(torch.ones(1, 2, 32)),
    "unet.time_embedding": lambda pipe: pipe.unet.time_embedding(torch.ones(1, 8)),
    "unet.conv_in": lambda pipe: pipe.unet.conv_in(torch.ones(1, 4, 8, 8)),
}


@pytest.mark.parametrize("mode", ["memory", "auto"])
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_part_that_is_called_by_itself_takes_inputs_from_the_host(
    entry: str, calls: int, mode: str, sim: ModuleType
) -> None:
    stock, pipe = factory.CASES["sd15"].build(), factory.CASES["sd15"].build()
    pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"residency": "lasting"})
    for _ in range(calls):
        factory.run("sd15", pipe)
    with torch.no_grad():
        expected = ENTRIES[entry](stock)
        for _ in range(2):
            found = ENTRIES[entry](pipe)
            assert str(found.device) == "sim:0"
            assert torch.equal(found.cpu(), expected)
    assert torch.equal(factory.run("sd15", pipe), factory.run("sd15", stock))
