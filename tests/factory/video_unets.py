"""Video pipelines with 3D UNets, and the zero-shot ones on image UNets."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.animatediff import tiny_motion_adapter
from factory.core import NO_RELOAD, add, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, call, frames, image_tensor, pil_image, prompted
from factory.stable_diffusion import sd_components, sd_pipeline
from factory.stable_diffusion_xl import sdxl_pipeline
from factory.text import WIDTH
from factory.vision import tiny_clip_image_processor, tiny_clip_vision

TAGS = "video unet clip"
SIZE = {"height": 32, "width": 32, "num_frames": 3, "negative_prompt": NEGATIVE}

LEVELS: dict[str, Any] = {
    "block_out_channels": (8, 16),
    "layers_per_block": 2,
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
    "norm_num_groups": 2,
}


def unet3d_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline of Stable Diffusion components with a 3D UNet."""
    return pipeline(pipeline_class, **sd_components(unet=diffusers.UNet3DConditionModel(**LEVELS)))


add("text_to_video", "TextToVideoSDPipeline", prompted(**SIZE), TAGS, unet3d_pipeline)
add(
    "video_to_video",
    "VideoToVideoSDPipeline",
    prompted(**IMG2IMG, negative_prompt=NEGATIVE, video=lambda: frames(3)),
    TAGS,
    unet3d_pipeline,
)


@register("i2vgen", "I2VGenXLPipeline", prompted(**SIZE, image=pil_image, clip_skip=None), TAGS + " clip_vision")
def i2vgen() -> DiffusionPipeline:
    """Image and text to video."""
    unet = diffusers.models.unets.unet_i2vgen_xl.I2VGenXLUNet(**LEVELS, num_attention_heads=None)
    return pipeline(
        "I2VGenXLPipeline",
        image_encoder=tiny_clip_vision(),
        feature_extractor=tiny_clip_image_processor(),
        **sd_components(unet=unet),
    )


SVD = {"height": 32, "width": 32, "num_frames": 3, "image": pil_image, "decode_chunk_size": 2}


@register("svd", "StableVideoDiffusionPipeline", call(**SVD), "video unet clip_vision")
def svd() -> DiffusionPipeline:
    """Image to video."""
    unet = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=2,
        sample_size=16,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=WIDTH,
        num_attention_heads=4,
        projection_class_embeddings_input_dim=3 * 8,
        addition_time_embed_dim=8,
    )
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=[32, 32], down_block_types=["DownEncoderBlock2D"] * 2, latent_channels=4, layers_per_block=1
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        sigma_min=0.002,
        sigma_max=700.0,
        timestep_type="continuous",
        use_karras_sigmas=True,
    )
    return pipeline(
        "StableVideoDiffusionPipeline",
        unet=unet,
        vae=vae,
        scheduler=scheduler,
        image_encoder=tiny_clip_vision(224, 56),  # the pipeline resizes to 224x224
        feature_extractor=tiny_clip_image_processor(224),
    )


ZERO = {
    "output_type": "np",
    "height": 32,
    "width": 32,
    "video_length": 3,
    "num_inference_steps": 5,
    "t0": 1,
    "t1": 3,
    "negative_prompt": NEGATIVE,
}

add(
    "zero_video",
    "TextToVideoZeroPipeline",
    prompted(**ZERO),
    f"{TAGS} {NO_RELOAD}",
    sd_pipeline,
    scheduler=diffusers.DDIMScheduler,
)
add(
    "zero_video_sdxl",
    "TextToVideoZeroSDXLPipeline",
    prompted(**ZERO),
    TAGS,
    sdxl_pipeline,
    scheduler=diffusers.DDIMScheduler,
)


def pia_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline whose motion adapter also replaces the first convolution of the UNet."""
    return sd_pipeline(pipeline_class, motion_adapter=tiny_motion_adapter(conv_in_channels=9))


add(
    "pia",
    "PIAPipeline",
    prompted(**SIZE, image=image_tensor, strength=1.0),
    TAGS + " shared",  # the UNet and the adapter have one first convolution between them
    pia_pipeline,
)
