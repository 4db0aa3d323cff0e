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


# ---- a device that isn't there


def test_a_device_that_is_not_there_is_an_error_at_the_first_call_and_disabling_mends_it(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    expected = factory.run("sd15", pipe)
    for _ in range(2):
        handle = pipe.enable_layerwise_offload(onload_device="sim:5")
        for _ in range(2):
            with pytest.raises(dl.LayerwiseOffloadError, match=r"sim:5 can't be used: .*disable_layerwise_offload\(\)"):
                factory.run("sd15", pipe)
        handle.report()
        pipe.disable_layerwise_offload()
        assert torch.equal(factory.run("sd15", pipe), expected)
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    factory.run("sd15", pipe)


def test_a_module_for_a_device_that_is_not_there_is_usable_again_after_remove(sim: ModuleType) -> None:
    module = models.make(models.STACKS["mlp_stack"])
    x = models.numbers(3, models.WIDTH)
    with torch.no_grad():
        expected = module(x)
        handle = dl.apply_layerwise_offload(module, onload_device="sim:5")
        with pytest.raises(dl.LayerwiseOffloadError, match="sim:5 can't be used"):
            module(x)
        handle.release()
        handle.remove()
        assert torch.equal(module(x), expected)


def test_a_kind_of_device_that_torch_was_not_built_for_is_refused(sim: ModuleType) -> None:
    module = models.make(models.STACKS["mlp_stack"])
    with pytest.raises(ValueError, match=r"onload_device='xpu:1' can't be used: the accelerator of torch .* is 'sim'"):
        dl.apply_layerwise_offload(module, onload_device="xpu:1")


def test_a_pipeline_moved_to_a_device_that_is_not_there_stays_where_it_was(sim: ModuleType) -> None:
    pipe = factory.CASES["sd15"].build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    expected = factory.run("sd15", pipe)
    for there in ("xpu", "cuda:1"):
        with pytest.raises(ValueError, match=rf"Pipeline.to\('{there}.*'\) can't be done: the accelerator of torch"):
            pipe.to(there)
    with pytest.raises(TypeError):
        pipe.to("cpu", "no dtype")
    assert str(pipe.device) == "sim:0"
    assert pipe.layerwise_offload is handle
    assert torch.equal(factory.run("sd15", pipe), expected)
