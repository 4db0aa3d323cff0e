"""EasyAnimate."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.core import KNOWN_BROKEN, add, fill, pipeline
from factory.inputs import NEGATIVE, prompted
from factory.multimodal import tiny_qwen2_vl
from factory.text import WIDTH
from factory.tokenizers import build_qwen2_tokenizer

TAGS = "video dit qwen2_vl"
SIZE = {"height": 16, "width": 16, "num_frames": 5, "negative_prompt": NEGATIVE}


def tiny_easyanimate(**options: Any) -> diffusers.ModelMixin:
    """EasyAnimateTransformer3DModel of four blocks."""
    defaults = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": WIDTH,
        "num_layers": 4,
        "sample_width": 16,
        "sample_height": 16,
        "patch_size": 2,
    }
    return diffusers.EasyAnimateTransformer3DModel(**(defaults | options))


def tiny_vae_magvit() -> diffusers.ModelMixin:
    """AutoencoderKLMagvit with four levels."""
    return diffusers.AutoencoderKLMagvit(
        in_channels=3,
        out_channels=3,
        down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
        up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )


def easyanimate_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of EasyAnimate components."""
    defaults = {
        "transformer": tiny_easyanimate,
        "vae": tiny_vae_magvit,
        "text_encoder": tiny_qwen2_vl,
        "tokenizer": build_qwen2_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


add("easyanimate", "EasyAnimatePipeline", prompted(**SIZE), TAGS, easyanimate_pipeline)
KNOWN_BROKEN["EasyAnimateControlPipeline"] = "calls its encode_prompt with an argument that it does not take"
KNOWN_BROKEN["EasyAnimateInpaintPipeline"] = "reads vae.config.cache_mag_vae, which no VAE of diffusers has"
