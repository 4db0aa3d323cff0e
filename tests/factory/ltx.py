"""LTX-Video."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_ltx
from factory.core import add, fill, pipeline, register
from factory.inputs import NEGATIVE, PROMPT, frames, image_tensor, prompted
from factory.text import WIDTH, tiny_t5
from factory.tokenizers import build_t5_tokenizer

TAGS = "video dit t5"
SIZE = {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 16, "negative_prompt": NEGATIVE}


def tiny_ltx(**options: Any) -> diffusers.ModelMixin:
    """LTXVideoTransformer3DModel of four blocks."""
    defaults = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "cross_attention_dim": 32,
        "num_layers": 4,
        "caption_channels": WIDTH,
    }
    return diffusers.LTXVideoTransformer3DModel(**(defaults | options))


def ltx_components(**components: Any) -> dict[str, Any]:
    """Components of an LTX pipeline; arguments replace or add some."""
    defaults = {
        "transformer": tiny_ltx,
        "vae": tiny_vae_ltx,
        "text_encoder": tiny_t5,
        "tokenizer": build_t5_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return fill(defaults, components)


def ltx_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of LTX components."""
    return pipeline(pipeline_class, **ltx_components(**components))


@register("ltx", "LTXPipeline", prompted(**SIZE), TAGS)
def ltx() -> DiffusionPipeline:
    """Text to video."""
    return ltx_pipeline("LTXPipeline")


IMAGE = {**SIZE, "image": image_tensor}
LATENT_TAGS = "video upsampler"

add("ltx_image", "LTXImageToVideoPipeline", prompted(**IMAGE), TAGS, ltx_pipeline)
add("ltx_condition", "LTXConditionPipeline", prompted(**IMAGE), TAGS, ltx_pipeline)
add(
    "ltx_condition_video",
    "LTXConditionPipeline",
    prompted(**SIZE, video=lambda: frames(9), frame_index=0, denoise_strength=1.0),
    TAGS,
    ltx_pipeline,
)
add(
    "ltx_long",
    "LTXI2VLongMultiPromptPipeline",
    prompted(
        **{**SIZE, "num_frames": 17},
        prompt=f"{PROMPT} | a red fox",
        temporal_tile_size=16,
        temporal_overlap=8,
        guidance_scale=2.0,
    ),
    TAGS,
    ltx_pipeline,
    scheduler=diffusers.LTXEulerAncestralRFScheduler,
)
add(
    "ltx_timestep_vae",
    "LTXPipeline",
    prompted(**SIZE, decode_timestep=0.05, decode_noise_scale=0.025),
    TAGS,
    ltx_pipeline,
    vae=lambda: tiny_vae_ltx(timestep_conditioning=True, decoder_inject_noise=(True, False, False, False, False)),
)


@register(
    "ltx_upsample",
    "LTXLatentUpsamplePipeline",
    lambda: {"video": image_tensor(32).repeat(5, 1, 1, 1), "height": 16, "width": 16, "output_type": "pt"},
    LATENT_TAGS,
)
def ltx_upsample() -> DiffusionPipeline:
    """Video to a video twice as large, through the latents."""
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    upsampler = LTXLatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=2)
    return pipeline("LTXLatentUpsamplePipeline", vae=tiny_vae_ltx(), latent_upsampler=upsampler)
