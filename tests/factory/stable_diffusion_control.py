"""Stable Diffusion 1.x, XL and 3 with ControlNet, ControlNet-XS, ControlNet Union and T2I-Adapter."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from factory.core import NO_RELOAD, add, register
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, prompted
from factory.stable_diffusion import SIZE, sd_pipeline
from factory.stable_diffusion_3 import SIZE as SIZE_3
from factory.stable_diffusion_3 import sd3_options, sd3_pipeline
from factory.stable_diffusion_xl import sdxl_pipeline
from factory.unets import SDXL_LEVELS, tiny_controlnet_sd, tiny_controlnet_sdxl, tiny_unet_sd, tiny_unet_sdxl

TAGS = "image unet clip controlnet"
TAGS_3 = "image dit clip t5 controlnet"


def two_controlnets() -> list[diffusers.ModelMixin]:
    """Two different ControlNets; the pipelines make a MultiControlNetModel of the list."""
    return [tiny_controlnet_sd(), tiny_controlnet_sd()]


def two_images() -> list[torch.Tensor]:
    """One condition for each of two ControlNets."""
    return [image_tensor(), image_tensor(seed=1)]


def tiny_union() -> diffusers.ModelMixin:
    """ControlNetUnionModel for Stable Diffusion XL."""
    options = SDXL_LEVELS | {"conditioning_embedding_out_channels": (8, 16)}
    return diffusers.ControlNetUnionModel(
        **options, num_control_type=6, num_trans_channel=8, num_trans_head=2, num_trans_layer=2, num_proj_channel=8
    )


def tiny_adapter(adapter_type: str = "full_adapter", **options: Any) -> diffusers.ModelMixin:
    """T2IAdapter whose features fit the tiny UNets."""
    return diffusers.T2IAdapter(
        in_channels=3,
        channels=[8, 16],
        num_res_blocks=2,
        adapter_type=adapter_type,
        **({"downscale_factor": 2} | options),
    )


def adapter_unet() -> diffusers.ModelMixin:
    """UNet whose levels fit the features of the adapters."""
    return tiny_unet_sd(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")
    )


def two_adapters() -> diffusers.ModelMixin:
    """MultiAdapter of two."""
    return diffusers.MultiAdapter([tiny_adapter(), tiny_adapter()])


def tiny_sd3_controlnet(**options: Any) -> diffusers.ModelMixin:
    """SD3ControlNetModel of two blocks."""
    return diffusers.SD3ControlNetModel(**(sd3_options() | {"num_layers": 2} | options))


FROM_IMAGE = {"image": lambda: image_tensor(seed=2), "control_image": image_tensor, "negative_prompt": NEGATIVE}
INPAINT = {**FROM_IMAGE, "mask_image": mask_image}
UNION = {"control_image": lambda: [image_tensor()], "control_mode": [1]}

add(
    "sd15_controlnet",
    "StableDiffusionControlNetPipeline",
    prompted(**SIZE, image=image_tensor),
    TAGS,
    sd_pipeline,
    controlnet=tiny_controlnet_sd,
)
add(
    "sd15_multi_controlnet",
    "StableDiffusionControlNetPipeline",
    prompted(**SIZE, image=two_images, controlnet_conditioning_scale=[1.0, 0.5]),
    TAGS + " multicontrolnet",
    sd_pipeline,
    controlnet=two_controlnets,
)
add(
    "sd15_controlnet_img2img",
    "StableDiffusionControlNetImg2ImgPipeline",
    prompted(**SIZE, **FROM_IMAGE, **IMG2IMG),
    TAGS,
    sd_pipeline,
    controlnet=tiny_controlnet_sd,
)
add(
    "sd15_controlnet_inpaint",
    "StableDiffusionControlNetInpaintPipeline",
    prompted(**SIZE, **INPAINT),
    TAGS,
    sd_pipeline,
    controlnet=tiny_controlnet_sd,
)
add(
    "sdxl_controlnet",
    "StableDiffusionXLControlNetPipeline",
    prompted(**SIZE, image=image_tensor, negative_prompt=NEGATIVE),
    TAGS,
    sdxl_pipeline,
    controlnet=tiny_controlnet_sdxl,
)
add(
    "sdxl_multi_controlnet",
    "StableDiffusionXLControlNetPipeline",
    prompted(**SIZE, image=two_images, controlnet_conditioning_scale=[1.0, 0.5]),
    TAGS + " multicontrolnet",
    sdxl_pipeline,
    controlnet=lambda: [tiny_controlnet_sdxl(), tiny_controlnet_sdxl()],
)
add(
    "sdxl_controlnet_img2img",
    "StableDiffusionXLControlNetImg2ImgPipeline",
    prompted(**SIZE, **FROM_IMAGE, **IMG2IMG),
    TAGS,
    sdxl_pipeline,
    controlnet=tiny_controlnet_sdxl,
)
add(
    "sdxl_controlnet_inpaint",
    "StableDiffusionXLControlNetInpaintPipeline",
    prompted(**SIZE, **INPAINT),
    TAGS,
    sdxl_pipeline,
    controlnet=tiny_controlnet_sdxl,
)
add(
    "sdxl_union",
    "StableDiffusionXLControlNetUnionPipeline",
    prompted(**SIZE, **UNION),
    TAGS,
    sdxl_pipeline,
    controlnet=tiny_union,
)
add(
    "sdxl_union_img2img",
    "StableDiffusionXLControlNetUnionImg2ImgPipeline",
    prompted(**SIZE, **UNION, image=lambda: image_tensor(seed=2), **IMG2IMG),
    TAGS,
    sdxl_pipeline,
    controlnet=tiny_union,
)
add(
    "sdxl_union_inpaint",
    "StableDiffusionXLControlNetUnionInpaintPipeline",
    prompted(**SIZE, **UNION, **IMG2IMG, image=lambda: image_tensor(seed=2), mask_image=mask_image),
    TAGS,
    sdxl_pipeline,
    controlnet=tiny_union,
)
add(
    "sd15_adapter",
    "StableDiffusionAdapterPipeline",
    prompted(**SIZE, image=image_tensor),
    "image unet clip adapter",
    sd_pipeline,
    adapter=tiny_adapter,
    unet=adapter_unet,
)
add(
    "sd15_multi_adapter",
    "StableDiffusionAdapterPipeline",
    prompted(**SIZE, image=two_images, adapter_conditioning_scale=[0.5, 0.5]),
    "image unet clip adapter",
    sd_pipeline,
    adapter=two_adapters,
    unet=adapter_unet,
)
add(
    "sdxl_adapter",
    "StableDiffusionXLAdapterPipeline",
    prompted(**SIZE, image=image_tensor),
    "image unet clip adapter",
    sdxl_pipeline,
    adapter=lambda: tiny_adapter("full_adapter_xl", downscale_factor=4),
)
add(
    "sd3_controlnet",
    "StableDiffusion3ControlNetPipeline",
    prompted(**SIZE_3, control_image=lambda: image_tensor(16)),
    TAGS_3,
    sd3_pipeline,
    controlnet=tiny_sd3_controlnet,
)
add(
    "sd3_multi_controlnet",
    "StableDiffusion3ControlNetPipeline",
    prompted(
        **SIZE_3,
        control_image=lambda: [image_tensor(16), image_tensor(16, seed=1)],
        controlnet_conditioning_scale=[1.0, 0.5],
    ),
    f"{TAGS_3} multicontrolnet {NO_RELOAD}",
    sd3_pipeline,
    controlnet=lambda: [tiny_sd3_controlnet(), tiny_sd3_controlnet()],
)
add(
    "sd3_controlnet_inpaint",
    "StableDiffusion3ControlNetInpaintingPipeline",
    prompted(**SIZE_3, control_image=lambda: image_tensor(16), control_mask=lambda: image_tensor(16, 1, 1)),
    TAGS_3,
    sd3_pipeline,
    controlnet=lambda: tiny_sd3_controlnet(extra_conditioning_channels=1),
)


XS_TAGS = f"{TAGS} {NO_RELOAD} idle:controlnet"
"""The pipeline merges both networks into one, whose configuration does not restore the number of norm groups."""


def _xs(unet: diffusers.ModelMixin) -> diffusers.ModelMixin:
    """A ControlNetXSAdapter for the UNet."""
    return diffusers.ControlNetXSAdapter.from_unet(
        unet, size_ratio=0.5, learn_time_embedding=True, conditioning_embedding_out_channels=(4, 8)
    )


@register("sd15_controlnet_xs", "StableDiffusionControlNetXSPipeline", prompted(**SIZE, image=image_tensor), XS_TAGS)
def sd15_controlnet_xs() -> DiffusionPipeline:
    """ControlNet-XS; its UNet interleaves the blocks of both networks."""
    unet = tiny_unet_sd(attention_head_dim=2, use_linear_projection=True)
    return sd_pipeline("StableDiffusionControlNetXSPipeline", unet=unet, controlnet=_xs(unet))


@register("sdxl_controlnet_xs", "StableDiffusionXLControlNetXSPipeline", prompted(**SIZE, image=image_tensor), XS_TAGS)
def sdxl_controlnet_xs() -> DiffusionPipeline:
    """ControlNet-XS for the XL UNet."""
    unet = tiny_unet_sdxl(attention_head_dim=2)
    return sdxl_pipeline("StableDiffusionXLControlNetXSPipeline", unet=unet, controlnet=_xs(unet))
