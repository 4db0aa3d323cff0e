"""Stable Diffusion XL."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import add, fill, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, prompted
from factory.stable_diffusion import SIZE
from factory.text import WIDTH, tiny_clip_text, tiny_clip_text_projection
from factory.tokenizers import build_clip_tokenizer
from factory.unets import tiny_unet_sdxl


def sdxl_scheduler() -> diffusers.SchedulerMixin:
    """The usual Euler schedule."""
    return diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
    )


def sdxl_components(**components: Any) -> dict[str, Any]:
    """Components of a Stable Diffusion XL pipeline; arguments replace or add some."""
    defaults: dict[str, Any] = {
        "unet": tiny_unet_sdxl,
        "vae": tiny_vae_kl,
        "text_encoder": tiny_clip_text,
        "text_encoder_2": tiny_clip_text_projection,
        "tokenizer": build_clip_tokenizer,
        "tokenizer_2": lambda: build_clip_tokenizer(pad_token="!"),
        "scheduler": sdxl_scheduler,
    }
    return fill(defaults, components)


def sdxl_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Stable Diffusion XL components without watermark."""
    pipe = pipeline(pipeline_class, **sdxl_components(**components))
    pipe.watermark = None
    return pipe


@register("sdxl", "StableDiffusionXLPipeline", prompted(**SIZE, negative_prompt=NEGATIVE), "image unet clip")
def sdxl() -> DiffusionPipeline:
    """Text to image."""
    return sdxl_pipeline("StableDiffusionXLPipeline")


TAGS = "image unet clip"
IMAGE = {"image": image_tensor, "negative_prompt": NEGATIVE}
INPAINT = {**IMAGE, "mask_image": mask_image, "strength": 1.0}


def tiny_unet_refiner() -> diffusers.ModelMixin:
    """The UNet of the refiner: one text encoder, five time ids."""
    return tiny_unet_sdxl(projection_class_embeddings_input_dim=5 * 8 + WIDTH, cross_attention_dim=WIDTH)


add("sdxl_img2img", "StableDiffusionXLImg2ImgPipeline", prompted(**IMAGE, **IMG2IMG), TAGS, sdxl_pipeline)
add(
    "sdxl_refiner",
    "StableDiffusionXLImg2ImgPipeline",
    prompted(**IMAGE, **IMG2IMG),
    TAGS,
    sdxl_pipeline,
    unet=tiny_unet_refiner,
    text_encoder=lambda: None,
    tokenizer=lambda: None,
    requires_aesthetics_score=lambda: True,
)
add("sdxl_inpaint", "StableDiffusionXLInpaintPipeline", prompted(**SIZE, **INPAINT), TAGS, sdxl_pipeline)
add(
    "sdxl_pix2pix",
    "StableDiffusionXLInstructPix2PixPipeline",
    prompted(**SIZE, **IMAGE, image_guidance_scale=1.5),
    TAGS,
    sdxl_pipeline,
    unet=lambda: tiny_unet_sdxl(in_channels=8),
)
