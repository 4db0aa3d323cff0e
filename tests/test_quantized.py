"""Quantised weights stream by the tensors inside them: torchao, optimum-quanto, bitsandbytes, GGUF."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import factory
import models
from compatibility import Cell
from diffusers_layerwise import LayerwiseOffloadError, apply_layerwise_offload, plan_layerwise_offload
from diffusers_layerwise.parts import find, is_shell
from quantized import KINDS, quantise

SLOW = pytest.mark.slow
CELLS = [(kind, device) for kind, (_, devices, _) in KINDS.items() for device in devices]
WIDTH = 64


class Wide(nn.Module):
    """Enough equal blocks of two linear layers that some stream and some stay."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Mlp(WIDTH, 2) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def stack(kind: str) -> nn.Module:
    """Quantised blocks, in bfloat16 as most checkpoints."""
    return quantise(models.make(Wide).to(torch.bfloat16), kind)


def inner(module: nn.Module) -> list[torch.Tensor]:
    """All plain tensors of a module."""
    owned = [(m, p) for m in module.modules() for p in m._parameters.values() if p is not None]
    return [part.tensor for m, parameter in owned for part in find(parameter, m)]


@pytest.mark.parametrize("mode", ["memory", "auto", pytest.param("speed", marks=SLOW)])
@pytest.mark.parametrize(("kind", "device"), CELLS)
def test_quantised_layers_stream(kind: str, device: str, mode: str, sim: ModuleType, cell: Cell) -> None:
    """A budget of half the bytes: some groups are resident and the rest streams."""
    cell("Quantised weights", kind, device)
    module, resident = stack(kind), stack(kind).to(device)
    parameters = list(map(id, module.parameters()))
    size = sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in inner(module)}.values())
    budget = None if mode == "memory" else size * 2 // 3
    handle = apply_layerwise_offload(module, mode, onload_device=device, memory_budget=budget)
    with torch.no_grad():
        for seed in range(4):
            x = models.numbers(4, WIDTH, seed=seed).to(torch.bfloat16)
            assert torch.equal(module(x).cpu(), resident(x.to(device)).cpu())
    streamed = handle.report().components[0].streamed_bytes
    assert streamed > 0
    assert handle.report().peak_seen <= handle.plan.peak_bytes < size
    handle.remove()
    assert list(map(id, module.parameters())) == parameters
    assert all(tensor.device.type == "cpu" for tensor in [*module.parameters(), *inner(module)])
    with torch.no_grad():
        x = models.numbers(4, WIDTH).to(torch.bfloat16)
        assert torch.equal(module(x), stack(kind)(x))


def quantised_flux(kind: str) -> DiffusionPipeline:
    pipe = factory.CASES["flux"].build()
    pipe.to(torch.bfloat16)
    quantise(pipe.transformer, kind)
    return pipe


@pytest.mark.parametrize("mode", ["auto", pytest.param("memory", marks=SLOW), pytest.param("speed", marks=SLOW)])
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param(*c, marks=() if c in (("torchao int8 weight-only", "sim"), ("GGUF Q8_0", "sim")) else SLOW)
        for c in CELLS
    ],
)
def test_a_pipeline_with_a_quantised_denoiser(kind: str, device: str, mode: str, sim: ModuleType, cell: Cell) -> None:
    if (kind, device) == ("quanto int4", "sim"):
        cell("Quantised weights", f"{kind}, Flux, packed for the CPU", device, "refused")
        with pytest.raises(LayerwiseOffloadError, match=r"'transformer' can't be streamed .*laid out for 'cpu'"):
            quantised_flux(kind).enable_layerwise_offload(mode=mode, onload_device=device)
        return
    cell("Quantised weights", f"{kind}, Flux", device)
    expected = factory.run("flux", quantised_flux(kind).to(device))
    pipe = quantised_flux(kind)
    budget = None if mode == "memory" else 400_000
    options: dict[str, Any] = {"memory_budget": budget, "config": {"activation_reserve": 0}}
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device=device, **options)
    for _ in range(3):
        assert torch.equal(factory.run("flux", pipe), expected)
    assert handle.report().peak_seen <= handle.plan.peak_bytes
    pipe.disable_layerwise_offload()
    assert torch.equal(factory.run("flux", pipe.to(device)), expected)


# ---------------------------------------------------------------------- one at a time
@pytest.mark.parametrize("kind", ["torchao int8 weight-only", "quanto int8", "GGUF Q8_0"])
def test_inner_tensors_travel_in_the_one_copy_of_their_group(kind: str, sim: ModuleType) -> None:
    module = stack(kind)
    handle = apply_layerwise_offload(module, "memory", onload_device="sim")
    x = models.numbers(4, WIDTH).to(torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            module(x)
    transfer = handle._runtime.transfer
    transfer.log, copies = [], transfer.copies
    with torch.no_grad():
        module(x)
    loads = [name for what, name in transfer.log if what == "load"]
    assert len(loads) == transfer.copies - copies > 1


@pytest.mark.parametrize("kind", ["torchao fp8 weight-only", "quanto fp8"])
def test_a_quantised_weight_says_where_it_is(kind: str, sim: ModuleType) -> None:
    module = stack(kind)
    seen: list[str] = []
    layer = module.blocks[2].up
    layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.device.type))
    apply_layerwise_offload(module, "memory", onload_device="sim")
    assert is_shell(layer.weight)
    with torch.no_grad():
        for _ in range(2):
            module(models.numbers(4, WIDTH).to(torch.bfloat16))
            assert layer.weight.device.type == "cpu"
    assert seen == ["sim", "sim"]


@pytest.mark.parametrize("kind", ["torchao int8 weight-only", "quanto int8", "GGUF Q8_0"])
def test_quantised_weights_return_to_the_device_they_came_from(kind: str, sim: ModuleType) -> None:
    module = stack(kind).to("sim")
    x = models.numbers(4, WIDTH).to(torch.bfloat16).to("sim")
    with torch.no_grad():
        expected = module(x).cpu()
        handle = apply_layerwise_offload(module, "memory", onload_device="sim")
        assert {tensor.device.type for tensor in [*module.parameters(), *inner(module)]} == {"cpu"}
        assert torch.equal(module(x).cpu(), expected)
        handle.remove()
        assert {tensor.device.type for tensor in [*module.parameters(), *inner(module)]} == {"sim"}
        assert torch.equal(module(x).cpu(), expected)


def test_a_quantised_weight_that_is_replaced_between_passes_is_seen(sim: ModuleType) -> None:
    kind = "torchao int8 weight-only"
    module, other = stack(kind), quantise(models.make(Wide, seed=5).to(torch.bfloat16), kind)
    apply_layerwise_offload(module, "memory", onload_device="sim")
    x = models.numbers(4, WIDTH).to(torch.bfloat16)
    with torch.no_grad():
        module(x)
        module.blocks[1].up._parameters["weight"] = other.blocks[1].up.weight
        module.blocks[3].up.weight.qdata.copy_(other.blocks[3].up.weight.qdata)
        reference = stack(kind)
        reference.blocks[1].up.weight = other.blocks[1].up.weight
        reference.blocks[3].up.weight.qdata.copy_(other.blocks[3].up.weight.qdata)
        expected = reference.to("sim")(x.to("sim")).cpu()
        for _ in range(3):
            assert torch.equal(module(x).cpu(), expected)


def test_bytes_laid_out_for_another_kind_of_device_are_refused_by_name(sim: ModuleType, cell: Cell) -> None:
    """quanto packs int4 for the CPU's kernels when it quantises there."""
    cell("Quantised weights", "quanto int4, packed for the CPU", "sim", "refused")
    module = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).to(torch.bfloat16)
    quantise(module, "quanto int4")
    with pytest.raises(LayerwiseOffloadError, match=r"1\.weight is a TinyGemm.*laid out for 'cpu'.*Move the component"):
        apply_layerwise_offload(module, "memory", onload_device="sim")
    assert not any("_hf_hook" in vars(part) for part in module.modules())


def test_a_state_dict_has_the_quantised_weights_of_the_host(sim: ModuleType) -> None:
    kind = "torchao int8 weight-only"
    module = stack(kind)
    apply_layerwise_offload(module, "memory", onload_device="sim")
    with torch.no_grad():
        module(models.numbers(4, WIDTH).to(torch.bfloat16))
    saved = module.state_dict()
    for name, value in stack(kind).state_dict().items():
        for part, expected in zip(find(saved[name]), find(value), strict=True):
            assert torch.equal(part.tensor, expected.tensor)


@pytest.mark.parametrize("mode", ["memory", "speed"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("torchao int8 weight-only", "deepcopy"),
        ("quanto int8", "pickle"),
        ("bitsandbytes 4 bit", "deepcopy"),
        ("bitsandbytes 4 bit", "pickle"),
        ("bitsandbytes 8 bit", "deepcopy"),
        ("bitsandbytes 8 bit", "pickle"),
    ],
)
def test_copies_have_memory_of_their_own_and_no_more(kind: str, way: str, mode: str, sim: ModuleType) -> None:
    module = stack(kind)
    device = KINDS[kind][1][0]
    apply_layerwise_offload(module, mode, onload_device=device)
    x = models.numbers(4, WIDTH).to(torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            result = module(x).cpu()
        twin = copy.deepcopy(module) if way == "deepcopy" else pickle.loads(pickle.dumps(module))
        assert torch.equal(twin(x), stack(kind)(x))
        assert torch.equal(module(x).cpu(), result)
    tensors = {t.untyped_storage().data_ptr(): t for t in inner(twin)}
    assert sum(t.untyped_storage().nbytes() for t in tensors.values()) < 2 * sum(
        t.numel() * t.element_size() for t in inner(stack(kind))
    )
    assert not any("_hf_hook" in vars(part) for part in twin.modules())


# ---------------------------------------------------------------------- planning
@pytest.mark.parametrize("kind", KINDS)
def test_planning_refuses_quantised_weights_by_name(kind: str) -> None:
    """On meta they would be counted as ordinary ones: int8 at twice to four times its size."""
    pipe = factory.CASES["flux"].build()
    quantise(pipe.transformer, kind)
    held = [id(tensor) for tensor in pipe.transformer.parameters()]
    with pytest.raises(LayerwiseOffloadError, match=r"'transformer' is quantised \(.*weight is a .*handle\.plan"):
        plan_layerwise_offload(pipe, hardware="RTX 4090", prompt="x")
    assert [id(tensor) for tensor in pipe.transformer.parameters()] == held


def test_planning_refuses_a_folder_of_quantised_weights_by_name(tmp_path: Path) -> None:
    index = {"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "unet").mkdir()
    config = {"_class_name": "UNet2DModel", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "unet" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LayerwiseOffloadError, match=r"'unet' is quantised .*config\.json.*\(bitsandbytes\)"):
        plan_layerwise_offload(tmp_path, hardware="RTX 4090")
