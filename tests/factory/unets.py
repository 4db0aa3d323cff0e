"""Builders of tiny UNets and ControlNets (real diffusers classes, random weights)."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import ModelMixin

from factory.text import WIDTH

TWO_LEVELS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "norm_num_groups": 4,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
}

SDXL_LEVELS: dict[str, Any] = TWO_LEVELS | {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 2),
    "projection_class_embeddings_input_dim": 6 * 8 + WIDTH,
    "cross_attention_dim": 2 * WIDTH,
}


def tiny_unet_sd(**options: Any) -> ModelMixin:
    """UNet2DConditionModel as in Stable Diffusion 1.5."""
    defaults = {"sample_size": 16, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DConditionModel(**(TWO_LEVELS | defaults | options))


def tiny_unet_sdxl(**options: Any) -> ModelMixin:
    """UNet2DConditionModel as in Stable Diffusion XL."""
    return tiny_unet_sd(**(SDXL_LEVELS | options))


def tiny_controlnet_sd(**options: Any) -> ModelMixin:
    """ControlNetModel for `tiny_unet_sd`; its condition is an image twice the latent size."""
    return diffusers.ControlNetModel(**(TWO_LEVELS | {"conditioning_embedding_out_channels": (8, 16)} | options))


def tiny_controlnet_sdxl(**options: Any) -> ModelMixin:
    """ControlNetModel for `tiny_unet_sdxl`."""
    return tiny_controlnet_sd(**(SDXL_LEVELS | options))


def tiny_prior(**options: Any) -> ModelMixin:
    """PriorTransformer of four blocks."""
    defaults = {"num_attention_heads": 2, "attention_head_dim": 12, "embedding_dim": WIDTH, "num_layers": 4}
    prior = diffusers.PriorTransformer(**(defaults | options))
    prior.clip_std.data.add_(1.0)
    return prior
