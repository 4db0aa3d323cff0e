"""Several handles and pipelines with modules in common: who governs, who gets what back, and what a refusal leaves."""

from __future__ import annotations

import copy
import gc
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise  # noqa: F401
import factory
from diffusers_layerwise import LayerwiseOffloadError
from factory.unets import tiny_unet_sd

MARKS = ("_hf_hook", "forward", "_old_forward", "_apply", "__deepcopy__", "__reduce_ex__")


def build() -> DiffusionPipeline:
    return factory.CASES["sd15"].build()


def run(pipe: DiffusionPipeline, **options: Any) -> torch.Tensor:
    return factory.run("sd15", pipe, **options)


def sharing(pipe: DiffusionPipeline, kind: type = diffusers.StableDiffusionPipeline, **parts: Any) -> DiffusionPipeline:
    """Another pipeline made of the same modules."""
    other = kind(**(pipe.components | parts), requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return other


def leftovers(pipe: DiffusionPipeline) -> list[str]:
    found = [name for name in pipe.__dict__ if "layerwise" in name]
    for name, module in factory.modules_of(pipe).items():
        found += [f"{name}.{path}: {m}" for path, part in module.named_modules() for m in MARKS if m in part.__dict__]
    return found


def places(pipe: DiffusionPipeline) -> set[str]:
    return {p.device.type for m in factory.modules_of(pipe).values() for p in m.parameters()}


def test_an_image_is_encoded_by_hand_between_calls(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(onload_device="sim", memory_budget="700KiB", config={"activation_reserve": 0})
    expected, pixels = run(build()), torch.zeros(1, 3, 32, 32)
    for _ in range(3):
        with torch.no_grad():
            pipe.vae.encode(pixels)
        assert torch.equal(run(pipe), expected)


@pytest.mark.parametrize("name", ["sd15_img2img", "flux_img2img"])
@pytest.mark.parametrize("percent", [60, 80, 100])
def test_pipelines_that_encode_an_image_within_a_budget(name: str, percent: int, sim: ModuleType) -> None:
    case = factory.CASES[name]
    expected = factory.run(case, case.build())
    pipe = case.build()
    weights = sum(p.numel() * p.element_size() for m in factory.modules_of(pipe).values() for p in m.parameters())
    handle = pipe.enable_layerwise_offload(
        onload_device="sim", memory_budget=weights * percent // 100, config={"activation_reserve": 0}
    )
    for _ in range(4):
        assert torch.equal(factory.run(case, pipe), expected)
    assert handle.report().peak_ever <= weights * percent // 100


def test_copies_and_devices_of_what_a_newer_handle_governs_outlive_the_older_one(sim: ModuleType) -> None:
    first = build()
    first.vae.to("sim")
    second = sharing(first)
    first.enable_layerwise_offload({"all": "layerwise", "vae": "skip"}, onload_device="sim")
    second.enable_layerwise_offload(mode="memory", onload_device="sim")
    first.disable_layerwise_offload()
    assert all(str(module.device) == "sim:0" for module in factory.modules_of(second).values())
    assert "_hf_hook" not in copy.deepcopy(second.vae).__dict__
    assert torch.equal(run(second), run(build()))
    second.disable_layerwise_offload()
    assert leftovers(second) == []


def test_a_pipeline_of_another_class_made_before_gives_its_memory_back_too(sim: ModuleType) -> None:
    pipe = build()
    other = sharing(pipe, diffusers.StableDiffusionImg2ImgPipeline)
    expected = factory.run("sd15_img2img", other)
    handle = pipe.enable_layerwise_offload(onload_device="sim", memory_budget="700KiB")
    for _ in range(2):
        assert torch.equal(factory.run("sd15_img2img", other), expected)
        assert handle._runtime.transfer.held_bytes == 0


def test_three_modules_of_one_name(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    others = []
    for width in (8, 16):
        torch.manual_seed(width)
        others.append(sharing(pipe, unet=tiny_unet_sd(layers_per_block=1 + width // 16).eval()))
    names = [component.name for component in pipe.layerwise_offload.report().components]
    assert len(names) == len(set(names)) == 5
    for each in (pipe, *others):
        stock = sharing(build(), unet=copy.deepcopy(each.unet))
        for _ in range(2):
            assert torch.equal(run(each), run(stock))


def test_removing_all_hooks_ends_every_handle(sim: ModuleType) -> None:
    first = build()
    second = sharing(first)
    first.enable_layerwise_offload(mode="memory", onload_device="sim")
    second.enable_layerwise_offload(mode="memory", onload_device="sim")
    second.remove_all_hooks()
    assert first.layerwise_offload is second.layerwise_offload is None
    assert leftovers(first) == []
    assert torch.equal(run(first), run(build()))


def test_enabling_anew_takes_the_followers_along(sim: ModuleType) -> None:
    first = build()
    first.enable_layerwise_offload(mode="memory", onload_device="sim")
    second = sharing(first)
    handle = first.enable_layerwise_offload(mode="auto", onload_device="sim")
    assert second.layerwise_offload is handle
    first.disable_layerwise_offload()
    assert second.layerwise_offload is None
    assert leftovers(first) == leftovers(second) == []


def test_a_pipeline_is_made_of_the_components_of_one_that_is_gone(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(["unet"], "memory", onload_device="sim")
    parts = pipe.components
    del pipe
    gc.collect()
    other = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    assert torch.equal(run(other), run(build()))


def fuse(pipe: DiffusionPipeline) -> None:
    pipe.unet.fuse_qkv_projections()


def new_parameter(pipe: DiffusionPipeline) -> None:
    pipe.unet.conv_in.weight = nn.Parameter(pipe.unet.conv_in.weight.detach().cpu().clone())


@pytest.mark.parametrize("edit", [fuse, new_parameter])
def test_what_is_put_in_goes_to_where_its_component_came_from(edit: Any, sim: ModuleType) -> None:
    pipe = build().to("sim")
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    edit(pipe)
    found = run(pipe)
    pipe.disable_layerwise_offload()
    assert places(pipe) == {"sim"}
    assert torch.equal(run(pipe), found)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_weights_go_home_after_two_handles_in_any_order(order: tuple[int, int], sim: ModuleType) -> None:
    first = build().to("sim")
    second = sharing(first)
    first.enable_layerwise_offload(mode="memory", onload_device="sim")
    second.enable_layerwise_offload(mode="memory", onload_device="sim")
    for index in order:
        (first, second)[index].disable_layerwise_offload()
    assert places(first) == {"sim"}
    assert leftovers(first) == []


def test_a_refusal_that_shows_late_leaves_the_earlier_call_in_force(sim: ModuleType) -> None:
    pipe = build()
    handle = pipe.enable_layerwise_offload({"vae": "resident", "unet": "layerwise"}, onload_device="sim")
    run(pipe)
    with pytest.raises(LayerwiseOffloadError, match=r"\['vae'\] is 'skip'"):
        pipe.enable_layerwise_offload({"vae": "skip", "unet": "layerwise"}, onload_device="sim")
    assert pipe.layerwise_offload is handle
    assert torch.equal(run(pipe), run(build()))


def test_a_pipeline_that_was_refused_leaves_no_trace_in_the_handle(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(onload_device="sim", memory_budget=200_000, config={"activation_reserve": 0})
    big: Any = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    big.config = pipe.unet.config
    with pytest.raises(torch.OutOfMemoryError):
        sharing(pipe, unet=big)
    torch.manual_seed(0)
    pipe.unet = tiny_unet_sd().eval()
    assert torch.isfinite(run(pipe)).all()


def test_a_skipped_component_that_is_swapped_out_is_ordinary(sim: ModuleType) -> None:
    pipe = build()
    pipe.vae.to("sim")
    pipe.enable_layerwise_offload({"all": "layerwise", "vae": "skip"}, onload_device="sim")
    old = pipe.vae
    pipe.vae = build().vae.to("sim")
    assert not any(mark in part.__dict__ for part in old.modules() for mark in MARKS)


def test_page_locked_memory_goes_with_what_is_let_go(sim: ModuleType) -> None:
    gc.collect()
    before = sim.mem(0)["pinned"]
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    run(pipe), run(pipe)
    new_parameter(pipe)
    run(pipe)
    old, pipe.text_encoder = pipe.text_encoder, build().text_encoder
    run(pipe)
    pipe.disable_layerwise_offload()
    assert sim.mem(0)["pinned"] == before
    assert old is not pipe.text_encoder
