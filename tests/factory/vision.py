"""Builders of tiny image encoders and their processors (real transformers classes, random weights)."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from factory.text import LAYERS, WIDTH


def _vit_options(image_size: int, patch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
    }
    return defaults | options


def tiny_clip_vision(image_size: int = 32, patch_size: int = 8, **options: Any) -> PreTrainedModel:
    """CLIPVisionModelWithProjection."""
    options = {"projection_dim": WIDTH} | options
    config = transformers.CLIPVisionConfig(**_vit_options(image_size, patch_size, options))
    return transformers.CLIPVisionModelWithProjection(config)


def tiny_clip_vision_model(image_size: int = 32, patch_size: int = 8, **options: Any) -> PreTrainedModel:
    """CLIPVisionModel."""
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_vit_options(image_size, patch_size, options)))


def tiny_clip_image_processor(size: int = 32) -> Any:
    """CLIPImageProcessor for the tiny vision encoders."""
    return transformers.CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def tiny_siglip_vision(image_size: int = 32, patch_size: int = 8, **options: Any) -> PreTrainedModel:
    """SiglipVisionModel."""
    return transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**_vit_options(image_size, patch_size, options))
    )


def tiny_siglip_image_processor(size: int = 32) -> Any:
    """SiglipImageProcessor for the tiny vision encoders."""
    return transformers.SiglipImageProcessor(size={"height": size, "width": size})
