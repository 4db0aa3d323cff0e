"""Components that arrive, are swapped or go after enabling, and pipelines made of one another's components."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

import diffusers_layerwise
import factory
from compatibility import Cell
from factory.inputs import image_tensor
from factory.unets import tiny_controlnet_sd, tiny_unet_sd
from factory.vision import tiny_clip_image_processor, tiny_clip_vision


def build(seed: int = 0) -> DiffusionPipeline:
    """A Stable Diffusion pipeline; another seed has other weights."""
    pipe = factory.CASES["sd15"].build()
    for module in factory.modules_of(pipe).values() if seed else []:
        shake(module, seed)
    return pipe


def shake(module: nn.Module, seed: int) -> nn.Module:
    """Weights that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.ndim == 1))
    return module.eval()


def run(pipe: DiffusionPipeline, **overrides: Any) -> torch.Tensor:
    return factory.run("sd15", pipe, **overrides)


def governed(pipe: DiffusionPipeline) -> set[str]:
    """Names in the report of a pipeline's handle."""
    handle = pipe.layerwise_offload
    assert handle is not None
    return {component.name for component in handle.report().components}


def hooked(module: nn.Module) -> bool:
    """Whether anything of ours or accelerate's is on a module or below."""
    return any({"_hf_hook", "_apply", "forward"} & set(m.__dict__) for m in module.modules())


def ip_adapter(unet: nn.Module, embed_dim: int) -> dict[str, dict[str, torch.Tensor]]:
    """An IP-Adapter's checkpoint for a UNet, with random weights."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    width = unet.config.cross_attention_dim
    tokens = 4
    image_proj = {
        "proj.weight": random(tokens * width, embed_dim),
        "proj.bias": random(tokens * width),
        "norm.weight": 1 + random(width),
        "norm.bias": random(width),
    }
    adapter: dict[str, torch.Tensor] = {}
    key = 1
    for name in unet.attn_processors:
        if name.endswith("attn1.processor"):
            continue
        hidden = unet.get_submodule(name.removesuffix(".processor")).to_k.out_features
        adapter[f"{key}.to_k_ip.weight"] = random(hidden, width)
        adapter[f"{key}.to_v_ip.weight"] = random(hidden, width)
        key += 2
    return {"image_proj": image_proj, "ip_adapter": adapter}


# ---------------------------------------------------------------------- what happens late
def late_image_encoder(pipe: DiffusionPipeline) -> tuple[DiffusionPipeline, dict[str, Any]]:
    encoder = shake(tiny_clip_vision(), 5)
    pipe.register_modules(image_encoder=encoder, feature_extractor=tiny_clip_image_processor())
    pipe.load_ip_adapter(
        ip_adapter(pipe.unet, encoder.config.projection_dim),
        subfolder=None,
        weight_name=None,
        image_encoder_folder=None,
    )
    pipe.set_ip_adapter_scale(0.8)
    return pipe, {"ip_adapter_image": image_tensor()}


def swapped_unet(pipe: DiffusionPipeline) -> tuple[DiffusionPipeline, dict[str, Any]]:
    pipe.unet = shake(tiny_unet_sd(), 6)
    return pipe, {}


def swapped_vae(pipe: DiffusionPipeline) -> tuple[DiffusionPipeline, dict[str, Any]]:
    pipe.vae = build(seed=7).vae
    return pipe, {}


def second_pipeline_with_new_controlnet(pipe: DiffusionPipeline) -> tuple[DiffusionPipeline, dict[str, Any]]:
    second = diffusers.StableDiffusionControlNetPipeline(**pipe.components, controlnet=shake(tiny_controlnet_sd(), 8))
    second.set_progress_bar_config(disable=True)
    return second, {"image": image_tensor()}


EVENTS: dict[str, Callable[[DiffusionPipeline], tuple[DiffusionPipeline, dict[str, Any]]]] = {
    "late image encoder": late_image_encoder,
    "swapped UNet": swapped_unet,
    "swapped VAE": swapped_vae,
    "second pipeline with a new ControlNet": second_pipeline_with_new_controlnet,
}


def model(pipe: DiffusionPipeline) -> None:
    pipe.enable_model_cpu_offload(device="sim")


def sequential(pipe: DiffusionPipeline) -> None:
    pipe.enable_sequential_cpu_offload(device="sim")


def leaf(pipe: DiffusionPipeline) -> None:
    pipe.enable_group_offload(onload_device=torch.device("sim"), offload_type="leaf_level", use_stream=True)


def nothing(_: DiffusionPipeline) -> None:
    return


BEFORE = {"model offload": model, "sequential offload": sequential, "leaf offload": leaf, "nothing": nothing}


@pytest.mark.parametrize("mode", ["memory", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("event", EVENTS)
def test_it_works_after_layerwise_has_replaced(event: str, before: str, mode: str, sim: ModuleType, cell: Cell) -> None:
    cell("Components that arrive late", event, before)
    reference, overrides = EVENTS[event](build())
    expected = run(reference, **overrides)
    pipe = build()
    BEFORE[before](pipe)
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim")
    assert torch.equal(run(pipe), run(build()))
    pipe, overrides = EVENTS[event](pipe)
    for _ in range(2):
        assert torch.equal(run(pipe, **overrides), expected)
    assert pipe.layerwise_offload is handle
    assert handle.report().peak_seen <= handle.plan.peak_bytes
    handle.remove()
    assert not any(hooked(module) for module in factory.modules_of(pipe).values())
    assert torch.equal(run(pipe, **overrides), expected)


# ---------------------------------------------------------------------- one at a time
def test_what_is_swapped_out_is_let_go_and_may_be_used_by_itself(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    run(pipe)
    old = pipe.unet
    before = {name: id(p) for name, p in old.named_parameters()}
    pipe.unet = shake(tiny_unet_sd(), 2)
    assert not hooked(old)
    assert {name: id(p) for name, p in old.named_parameters()} == before
    assert all(p.untyped_storage().nbytes() < 4 * p.numel() * p.element_size() + 10**6 for p in old.parameters())
    assert str(old.device) == "cpu"
    reference = build()
    reference.unet = old
    pipe.unet = old
    assert torch.equal(run(pipe), run(build()))


def test_what_is_swapped_out_returns_to_the_device_it_came_from(sim: ModuleType) -> None:
    pipe = build().to("sim")
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    old = pipe.vae
    run(pipe)
    pipe.vae = build(seed=2).vae
    assert {p.device.type for p in old.parameters()} == {"sim"}
    assert {p.device.type for p in pipe.vae.parameters()} == {"cpu"}


def test_only_the_component_that_arrives_is_learned_anew(sim: ModuleType) -> None:
    pipe = build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    run(pipe), run(pipe)
    others = [s for s in handle._runtime.schedules if s.name != "vae"]
    before = {s.name: (list(s.order.sequence), s.groups, s.store._chunks) for s in others}
    pipe.vae = build(seed=3).vae
    assert {s.name: (list(s.order.sequence), s.groups, s.store._chunks) for s in others} == before
    reference = build()
    reference.vae = build(seed=3).vae
    for _ in range(2):
        assert torch.equal(run(pipe), run(reference))
    assert [s for s in handle._runtime.schedules if s.name != "vae"] == others


@pytest.mark.parametrize("components", ["all", ["all", "!image_encoder"], ["default"], ["unet"], ["=image_encoder"]])
def test_a_selection_applies_to_what_arrives_later(components: Any, sim: ModuleType) -> None:
    pipe = build()
    handle = pipe.enable_layerwise_offload(components, "memory", onload_device="sim")
    assert "image_encoder" not in governed(pipe)
    late_image_encoder(pipe)
    report = {c.name: c for c in handle.report().components}
    selected = components in ("all", ["default"], ["=image_encoder"])
    assert (report["image_encoder"].choice == "layerwise") == selected
    reference, overrides = late_image_encoder(build())
    assert torch.equal(run(pipe, **overrides), run(reference, **overrides))


def test_a_component_may_be_taken_away_again(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    encoder = tiny_clip_vision()
    pipe.image_encoder = encoder
    assert "image_encoder" in governed(pipe)
    pipe.image_encoder = None
    assert "image_encoder" not in governed(pipe)
    assert not hooked(encoder)
    assert torch.equal(run(pipe), run(build()))


def test_an_assignment_that_cannot_be_streamed_is_refused_before_it_happens(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(["=unet", "vae"], "memory", onload_device="sim")
    old, new = pipe.unet, tiny_unet_sd()
    new.conv_in.weight = nn.Parameter(torch.empty_like(new.conv_in.weight, device="meta"))
    with pytest.raises(diffusers_layerwise.LayerwiseOffloadError, match="'unet' can't be streamed"):
        pipe.unet = new
    assert pipe.unet is old
    assert torch.equal(run(pipe), run(build()))


def test_an_assignment_that_breaks_the_budget_is_refused_before_it_happens(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(
        mode="auto", onload_device="sim", memory_budget=200_000, config={"activation_reserve": 0}
    )
    old = pipe.unet
    with pytest.raises(torch.OutOfMemoryError, match="smallest budget that works"):
        pipe.unet = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    assert pipe.unet is old
    assert torch.equal(run(pipe), run(build()))


def test_a_budget_is_kept_with_what_arrived(sim: ModuleType) -> None:
    reference, overrides = late_image_encoder(build())
    expected = run(reference, **overrides)
    pipe = build()
    handle = pipe.enable_layerwise_offload(
        mode="auto", onload_device="sim", memory_budget=300_000, config={"activation_reserve": 0}
    )
    run(pipe)
    late_image_encoder(pipe)
    for _ in range(3):
        assert torch.equal(run(pipe, **overrides), expected)
        assert handle.report().peak_ever <= 300_000
        assert handle._runtime.transfer.held_bytes == 0


def test_components_may_be_swapped_between_steps(sim: ModuleType) -> None:
    def swap(pipe: DiffusionPipeline, step: int, *_: Any) -> dict[str, Any]:
        if step == 0:
            pipe.vae = build(seed=4).vae
        return {}

    expected = run(build(), callback_on_step_end=swap)
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    for _ in range(2):
        assert torch.equal(run(pipe, callback_on_step_end=swap), expected)


# ---------------------------------------------------------------------- inside a component
@pytest.mark.parametrize("mode", ["memory", "auto", "speed"])
def test_projections_fused_after_enabling(mode: str, sim: ModuleType) -> None:
    reference, pipe = build(), build()
    handle = pipe.enable_layerwise_offload(mode=mode, onload_device="sim", config={"residency": "lasting"})
    assert torch.equal(run(pipe), run(reference))
    for _ in range(2):
        for each in (reference, pipe):
            each.fuse_qkv_projections()
        assert torch.equal(run(pipe), run(reference))
        assert torch.equal(run(pipe), run(reference))
        for each in (reference, pipe):
            each.unfuse_qkv_projections()
        assert torch.equal(run(pipe), run(reference))
    handle.remove()
    assert not any(hooked(module) for module in factory.modules_of(pipe).values())


def test_a_block_swapped_for_a_larger_one_between_calls(sim: ModuleType) -> None:
    reference, pipe = build(), build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    run(pipe)
    for each in (reference, pipe):
        old = each.unet.conv_out
        new = nn.Sequential(nn.Conv2d(old.in_channels, 64, 3, padding=1), nn.Conv2d(64, old.out_channels, 1))
        each.unet.conv_out = shake(new, 1)
    for _ in range(2):
        assert torch.equal(run(pipe), run(reference))
    assert not hooked(old)


# ---------------------------------------------------------------------- several pipelines
def test_from_pipe_belongs_to_the_same_handle_and_leaves_by_itself(sim: ModuleType) -> None:
    pipe = build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    second = diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    second.set_progress_bar_config(disable=True)
    assert second.layerwise_offload is handle
    expected = factory.run("sd15_img2img", diffusers.StableDiffusionImg2ImgPipeline.from_pipe(build()))
    for _ in range(2):
        assert torch.equal(factory.run("sd15_img2img", second), expected)
        assert torch.equal(run(pipe), run(build()))
        assert handle._runtime.transfer.held_bytes == 0
    second.disable_layerwise_offload()
    assert second.layerwise_offload is None
    assert pipe.layerwise_offload is handle
    assert torch.equal(run(pipe), run(build()))


def test_what_only_the_second_pipeline_has_goes_with_it(sim: ModuleType) -> None:
    pipe = build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    second, overrides = second_pipeline_with_new_controlnet(pipe)
    run(second, **overrides)
    assert "controlnet" in governed(pipe)
    controlnet = second.controlnet
    second.disable_layerwise_offload()
    assert "controlnet" not in governed(pipe)
    assert not hooked(controlnet)
    assert hooked(pipe.unet)
    assert pipe.layerwise_offload is handle


def test_disabling_the_first_pipeline_makes_all_of_them_ordinary(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    second, _ = second_pipeline_with_new_controlnet(pipe)
    pipe.disable_layerwise_offload()
    assert second.layerwise_offload is None
    assert not any(hooked(module) for module in factory.modules_of(second).values())


def test_two_pipelines_with_different_modules_of_one_name(sim: ModuleType) -> None:
    pipe = build()
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    first, overrides = second_pipeline_with_new_controlnet(pipe)
    parts = {**pipe.components, "controlnet": shake(tiny_controlnet_sd(), 9)}
    second = diffusers.StableDiffusionControlNetPipeline(**parts)
    second.set_progress_bar_config(disable=True)
    assert {name for name in governed(pipe) if "controlnet" in name} == {
        "controlnet",
        "controlnet of StableDiffusionControlNetPipeline",
    }
    stock = build()
    stock_first, _ = second_pipeline_with_new_controlnet(stock)
    stock_second = copy.deepcopy(stock_first)
    stock_second.controlnet = shake(tiny_controlnet_sd(), 9)
    for _ in range(2):
        assert torch.equal(run(first, **overrides), run(stock_first, **overrides))
        assert torch.equal(run(second, **overrides), run(stock_second, **overrides))


def test_a_pipeline_that_is_gone_takes_its_components_with_it(sim: ModuleType) -> None:
    pipe = build()
    handle = pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    second, overrides = second_pipeline_with_new_controlnet(pipe)
    run(second, **overrides)
    del second
    gc.collect()
    pipe.vae = build(seed=2).vae
    assert "controlnet" not in {component.name for component in handle.report().components}


def test_modules_of_a_bare_handle_are_not_drawn_into_a_pipelines(sim: ModuleType) -> None:
    unet = shake(tiny_unet_sd(), 2)
    handle = diffusers_layerwise.apply_layerwise_offload(unet, "memory", onload_device="sim")
    pipe = build()
    pipe.unet = unet
    assert pipe.layerwise_offload is None
    pipe.enable_layerwise_offload(mode="memory", onload_device="sim")
    reference = build()
    reference.unet = shake(tiny_unet_sd(), 2)
    assert torch.equal(run(pipe), run(reference))
    pipe.disable_layerwise_offload()
    assert [c.name for c in handle.report().components] == []
