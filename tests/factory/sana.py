"""Sana and Sana-Video."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_wan
from factory.core import add, fill, pipeline
from factory.inputs import NEGATIVE, image_tensor, pil_image, prompted
from factory.text import WIDTH, tiny_gemma2
from factory.tokenizers import build_gemma_tokenizer

TAGS = "image dit gemma2"
SIZE = {
    "height": 32,
    "width": 32,
    "max_sequence_length": 16,
    "use_resolution_binning": False,
    "complex_human_instruction": lambda: ["describe the image:"],
}
GUIDED = {**SIZE, "negative_prompt": NEGATIVE}


def sana_options() -> dict[str, Any]:
    """The configuration that the transformer shares with its ControlNet."""
    return {
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": WIDTH,
        "sample_size": 16,
    }


def tiny_vae_dc() -> diffusers.ModelMixin:
    """AutoencoderDC with one plain and one attention level."""
    return diffusers.AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )


def sana_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Sana components."""
    defaults = {
        "transformer": lambda: diffusers.SanaTransformer2DModel(**sana_options()),
        "vae": tiny_vae_dc,
        "text_encoder": tiny_gemma2,
        "tokenizer": build_gemma_tokenizer,
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return pipeline(pipeline_class, **fill(defaults, components))


def tiny_sprint() -> diffusers.ModelMixin:
    """SanaTransformer2DModel with embedded guidance."""
    return diffusers.SanaTransformer2DModel(**sana_options(), qk_norm="rms_norm_across_heads", guidance_embeds=True)


add("sana", "SanaPipeline", prompted(**GUIDED), TAGS, sana_pipeline)
add(
    "sana_controlnet",
    "SanaControlNetPipeline",
    prompted(**GUIDED, control_image=image_tensor),
    TAGS + " controlnet",
    sana_pipeline,
    controlnet=lambda: diffusers.SanaControlNetModel(**(sana_options() | {"num_layers": 2})),
)
add(
    "sana_sprint",
    "SanaSprintPipeline",
    prompted(**SIZE),
    TAGS,
    sana_pipeline,
    transformer=tiny_sprint,
    scheduler=diffusers.SCMScheduler,
)
add(
    "sana_sprint_img2img",
    "SanaSprintImg2ImgPipeline",
    prompted(**SIZE, image=image_tensor, strength=1.0),
    TAGS,
    sana_pipeline,
    transformer=tiny_sprint,
    scheduler=diffusers.SCMScheduler,
)


def sana_video_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Sana-Video components."""
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=WIDTH,
        sample_size=8,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return sana_pipeline(pipeline_class, transformer=transformer, vae=tiny_vae_wan(), **components)


VIDEO = {**GUIDED, "frames": 5}

add("sana_video", "SanaVideoPipeline", prompted(**VIDEO), "video dit gemma2", sana_video_pipeline)
add(
    "sana_image_video",
    "SanaImageToVideoPipeline",
    prompted(**VIDEO, image=pil_image),
    "video dit gemma2",
    sana_video_pipeline,
)
