"""AnimateDiff and the video UNets."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.core import add
from factory.inputs import IMG2IMG, NEGATIVE, frames, prompted
from factory.stable_diffusion import sd_pipeline
from factory.stable_diffusion_xl import sdxl_pipeline
from factory.text import WIDTH
from factory.unets import tiny_controlnet_sd

TAGS = "video unet clip idle:motion_adapter"  # the UNet holds copies of the motion modules
SIZE = {"height": 32, "width": 32, "num_frames": 3, "negative_prompt": NEGATIVE}


def tiny_motion_adapter(**options: Any) -> diffusers.ModelMixin:
    """MotionAdapter for the tiny UNets."""
    return diffusers.MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=2,
        motion_norm_num_groups=2,
        motion_num_attention_heads=2,
        **options,
    )


def motion_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline that merges the motion adapter into the UNet of Stable Diffusion."""
    make = sdxl_pipeline if "XL" in pipeline_class else sd_pipeline
    options = {"use_motion_mid_block": False} if "XL" in pipeline_class else {}
    scheduler = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False)
    return make(pipeline_class, motion_adapter=tiny_motion_adapter(**options), scheduler=scheduler, **components)


def tiny_sparse_controlnet() -> diffusers.ModelMixin:
    """SparseControlNetModel for the tiny UNets."""
    return diffusers.SparseControlNetModel(
        block_out_channels=(8, 16),
        conditioning_channels=3,
        layers_per_block=2,
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(8, 8),
        norm_num_groups=2,
        use_simplified_condition_embedding=False,
    )


VIDEO = {**IMG2IMG, "negative_prompt": NEGATIVE, "video": lambda: frames(3), "height": 32, "width": 32}

add("animatediff", "AnimateDiffPipeline", prompted(**SIZE), TAGS, motion_pipeline)
add("animatediff_sdxl", "AnimateDiffSDXLPipeline", prompted(**SIZE), TAGS, motion_pipeline)
add("animatediff_video", "AnimateDiffVideoToVideoPipeline", prompted(**VIDEO), TAGS, motion_pipeline)
add(
    "animatediff_controlnet",
    "AnimateDiffControlNetPipeline",
    prompted(**SIZE, conditioning_frames=lambda: frames(3)),
    TAGS + " controlnet",
    motion_pipeline,
    controlnet=tiny_controlnet_sd,
)
add(
    "animatediff_video_controlnet",
    "AnimateDiffVideoToVideoControlNetPipeline",
    prompted(**VIDEO, conditioning_frames=lambda: frames(3)),
    TAGS + " controlnet",
    motion_pipeline,
    controlnet=tiny_controlnet_sd,
)
add(
    "animatediff_sparse",
    "AnimateDiffSparseControlNetPipeline",
    prompted(**SIZE, conditioning_frames=lambda: frames(3), controlnet_frame_indices=[0, 1, 2]),
    TAGS + " controlnet",
    motion_pipeline,
    controlnet=tiny_sparse_controlnet,
)
