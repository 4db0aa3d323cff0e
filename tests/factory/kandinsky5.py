"""Kandinsky 5."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow, tiny_vae_hunyuan
from factory.core import NO_RELOAD, add, fill, pipeline
from factory.inputs import NEGATIVE, pil_image, prompted
from factory.multimodal import VisionLanguageProcessor, tiny_qwen2_5_vl
from factory.text import WIDTH, tiny_clip_text
from factory.tokenizers import build_clip_tokenizer

TAGS = f"dit qwen2_5_vl clip {NO_RELOAD}"
SIZE = {"height": 32, "width": 32, "max_sequence_length": 32, "negative_prompt": NEGATIVE}


def tiny_kandinsky5(**options: Any) -> diffusers.ModelMixin:
    """Kandinsky5Transformer3DModel with two text and four visual blocks."""
    defaults = {
        "in_visual_dim": 4,
        "in_text_dim": WIDTH,
        "in_text_dim2": WIDTH,
        "time_dim": 16,
        "out_visual_dim": 4,
        "patch_size": (1, 2, 2),
        "model_dim": 16,
        "ff_dim": 32,
        "num_text_blocks": 2,
        "num_visual_blocks": 4,
        "axes_dims": (1, 1, 2),
        "visual_cond": False,
        "attention_type": "regular",
    }
    return diffusers.Kandinsky5Transformer3DModel(**(defaults | options))


def kandinsky5_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Kandinsky 5 components."""
    defaults = {
        "transformer": tiny_kandinsky5,
        "vae": lambda: tiny_vae_flow(channels=(8, 8, 8, 16)) if "2I" in pipeline_class else tiny_vae_hunyuan(),
        "text_encoder": tiny_qwen2_5_vl,
        "tokenizer": VisionLanguageProcessor,
        "text_encoder_2": tiny_clip_text,
        "tokenizer_2": build_clip_tokenizer,
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    pipe = pipeline(pipeline_class, **fill(defaults, components))
    if "2I" in pipeline_class:
        pipe.resolutions = [(SIZE["width"], SIZE["height"])]
    return pipe


add("kandinsky5_video", "Kandinsky5T2VPipeline", prompted(**SIZE, num_frames=5), f"video {TAGS}", kandinsky5_pipeline)
add(
    "kandinsky5_image_video",
    "Kandinsky5I2VPipeline",
    prompted(**SIZE, num_frames=21, image=pil_image),
    f"video {TAGS}",
    kandinsky5_pipeline,
    transformer=lambda: tiny_kandinsky5(visual_cond=True),
)
add("kandinsky5_image", "Kandinsky5T2IPipeline", prompted(**SIZE), f"image {TAGS}", kandinsky5_pipeline)
add(
    "kandinsky5_image_image",
    "Kandinsky5I2IPipeline",
    prompted(**{**SIZE, "max_sequence_length": 512}, image=pil_image),
    f"image {TAGS}",
    kandinsky5_pipeline,
    transformer=lambda: tiny_kandinsky5(visual_cond=True),
)
