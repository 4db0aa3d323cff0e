"""Stable Diffusion 3."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow
from factory.core import add, fill, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, prompted
from factory.text import WIDTH, tiny_clip_text_projection, tiny_t5
from factory.tokenizers import build_clip_tokenizer, build_t5_tokenizer

TAGS = "image dit clip t5"
SIZE = {"height": 16, "width": 16, "max_sequence_length": 32}


def sd3_options() -> dict[str, Any]:
    """The configuration that the transformer shares with its ControlNet."""
    return {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": WIDTH * 2,
        "pooled_projection_dim": WIDTH * 2,
        "out_channels": 4,
        "pos_embed_max_size": 16,
        "dual_attention_layers": (1,),
        "qk_norm": "rms_norm",
    }


def tiny_sd3(**options: Any) -> diffusers.ModelMixin:
    """SD3Transformer2DModel of four blocks, one of them with dual attention."""
    return diffusers.SD3Transformer2DModel(**(sd3_options() | options))


def sd3_components(**components: Any) -> dict[str, Any]:
    """Components of a Stable Diffusion 3 pipeline; arguments replace or add some."""
    defaults = {
        "transformer": tiny_sd3,
        "vae": tiny_vae_flow,
        "text_encoder": tiny_clip_text_projection,
        "text_encoder_2": tiny_clip_text_projection,
        "text_encoder_3": lambda: tiny_t5(d_model=WIDTH * 2),
        "tokenizer": build_clip_tokenizer,
        "tokenizer_2": lambda: build_clip_tokenizer(pad_token="!"),
        "tokenizer_3": build_t5_tokenizer,
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return fill(defaults, components)


def sd3_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Stable Diffusion 3 components."""
    return pipeline(pipeline_class, **sd3_components(**components))


@register("sd3", "StableDiffusion3Pipeline", prompted(**SIZE, negative_prompt=NEGATIVE), TAGS)
def sd3() -> DiffusionPipeline:
    """Text to image with three text encoders."""
    return sd3_pipeline("StableDiffusion3Pipeline")


IMAGE = {**SIZE, "image": lambda: image_tensor(16), "negative_prompt": NEGATIVE}

add("sd3_img2img", "StableDiffusion3Img2ImgPipeline", prompted(**IMAGE, **IMG2IMG), TAGS, sd3_pipeline)
add(
    "sd3_inpaint",
    "StableDiffusion3InpaintPipeline",
    prompted(**IMAGE, **IMG2IMG, mask_image=lambda: mask_image(16)),
    TAGS,
    sd3_pipeline,
    transformer=lambda: tiny_sd3(in_channels=16, out_channels=16),
    vae=lambda: tiny_vae_flow(16),
)
