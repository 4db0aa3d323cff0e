"""Pipelines with perturbed attention guidance."""

from __future__ import annotations

import diffusers

from factory.animatediff import TAGS as MOTION_TAGS
from factory.animatediff import motion_pipeline
from factory.core import add
from factory.hunyuan_dit import DIT_SIZE, DIT_TAGS, hunyuan_dit_pipeline
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, prompted
from factory.kolors import KOLORS, kolors_pipeline
from factory.pixart import SQUARE, pixart_pipeline
from factory.sana import GUIDED, sana_pipeline
from factory.stable_diffusion import SIZE, sd_pipeline
from factory.stable_diffusion_3 import SIZE as SIZE_3
from factory.stable_diffusion_3 import TAGS as TAGS_3
from factory.stable_diffusion_3 import sd3_pipeline, tiny_sd3
from factory.stable_diffusion_xl import sdxl_pipeline
from factory.unets import tiny_controlnet_sd, tiny_controlnet_sdxl

TAGS = "image unet clip pag"
GUIDANCE = {"pag_scale": 3.0, "negative_prompt": NEGATIVE}
TEXT = {**SIZE, **GUIDANCE}
IMAGE = {**GUIDANCE, **IMG2IMG, "image": image_tensor}
INPAINT = {**SIZE, **IMAGE, "mask_image": mask_image}
CONTROL = {"control_image": lambda: image_tensor(seed=1)}


def plain_sd3() -> diffusers.ModelMixin:
    """SD3Transformer2DModel without dual attention, which perturbed guidance can't handle."""
    return tiny_sd3(dual_attention_layers=())


add("sd15_pag", "StableDiffusionPAGPipeline", prompted(**TEXT), TAGS, sd_pipeline)
add("sd15_pag_img2img", "StableDiffusionPAGImg2ImgPipeline", prompted(**IMAGE), TAGS, sd_pipeline)
add("sd15_pag_inpaint", "StableDiffusionPAGInpaintPipeline", prompted(**INPAINT), TAGS, sd_pipeline)
add(
    "sd15_pag_controlnet",
    "StableDiffusionControlNetPAGPipeline",
    prompted(**TEXT, image=image_tensor),
    TAGS + " controlnet",
    sd_pipeline,
    controlnet=tiny_controlnet_sd,
)
add(
    "sd15_pag_controlnet_inpaint",
    "StableDiffusionControlNetPAGInpaintPipeline",
    prompted(**INPAINT, **CONTROL),
    TAGS + " controlnet",
    sd_pipeline,
    controlnet=tiny_controlnet_sd,
)
add("sdxl_pag", "StableDiffusionXLPAGPipeline", prompted(**TEXT), TAGS, sdxl_pipeline)
add("sdxl_pag_img2img", "StableDiffusionXLPAGImg2ImgPipeline", prompted(**IMAGE), TAGS, sdxl_pipeline)
add("sdxl_pag_inpaint", "StableDiffusionXLPAGInpaintPipeline", prompted(**INPAINT), TAGS, sdxl_pipeline)
add(
    "sdxl_pag_controlnet",
    "StableDiffusionXLControlNetPAGPipeline",
    prompted(**TEXT, image=image_tensor),
    TAGS + " controlnet",
    sdxl_pipeline,
    controlnet=tiny_controlnet_sdxl,
)
add(
    "sdxl_pag_controlnet_img2img",
    "StableDiffusionXLControlNetPAGImg2ImgPipeline",
    prompted(**SIZE, **IMAGE, **CONTROL),
    TAGS + " controlnet",
    sdxl_pipeline,
    controlnet=tiny_controlnet_sdxl,
)
add(
    "sd3_pag",
    "StableDiffusion3PAGPipeline",
    prompted(**SIZE_3, **GUIDANCE),
    TAGS_3 + " pag",
    sd3_pipeline,
    transformer=plain_sd3,
)
add(
    "sd3_pag_img2img",
    "StableDiffusion3PAGImg2ImgPipeline",
    prompted(**SIZE_3, **GUIDANCE, **IMG2IMG, image=lambda: image_tensor(16)),
    TAGS_3 + " pag",
    sd3_pipeline,
    transformer=plain_sd3,
)
add("kolors_pag", "KolorsPAGPipeline", prompted(**KOLORS, pag_scale=3.0), "image unet chatglm pag", kolors_pipeline)
add(
    "hunyuan_dit_pag",
    "HunyuanDiTPAGPipeline",
    prompted(**DIT_SIZE, pag_scale=3.0),
    DIT_TAGS + " pag",
    hunyuan_dit_pipeline,
)
add(
    "pixart_sigma_pag",
    "PixArtSigmaPAGPipeline",
    prompted(**SQUARE, pag_scale=3.0),
    "image dit t5 pag",
    pixart_pipeline,
)
add(
    "sana_pag",
    "SanaPAGPipeline",
    prompted(**GUIDED, pag_scale=3.0),
    "image dit gemma2 pag",
    sana_pipeline,
)
add(
    "animatediff_pag",
    "AnimateDiffPAGPipeline",
    prompted(height=32, width=32, num_frames=3, **GUIDANCE),
    MOTION_TAGS + " pag",
    motion_pipeline,
)
