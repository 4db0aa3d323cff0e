"""Wan and the video pipelines built on its transformer."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_wan
from factory.core import add, fill, pipeline, register
from factory.inputs import DROP, IMG2IMG, NEGATIVE, frames, mask_image, pil_image, prompted
from factory.text import WIDTH, tiny_umt5
from factory.tokenizers import build_t5_tokenizer
from factory.vision import tiny_clip_image_processor, tiny_clip_vision

TAGS = "video dit umt5"
SIZE = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16, "negative_prompt": NEGATIVE}


def tiny_wan(**options: Any) -> diffusers.ModelMixin:
    """WanTransformer3DModel of four blocks."""
    return diffusers.WanTransformer3DModel(**(wan_options() | options))


def wan_options() -> dict[str, Any]:
    """The configuration that the transformers of the Wan family share."""
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": WIDTH,
        "freq_dim": 32,
        "ffn_dim": 32,
        "num_layers": 4,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }


def wan_components(**components: Any) -> dict[str, Any]:
    """Components of a Wan pipeline; arguments replace or add some."""
    defaults: dict[str, Any] = {
        "transformer": tiny_wan,
        "vae": tiny_vae_wan,
        "text_encoder": tiny_umt5,
        "tokenizer": build_t5_tokenizer,
        "scheduler": lambda: diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
    }
    return fill(defaults, components)


def wan_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Wan components."""
    return pipeline(pipeline_class, **wan_components(**components))


@register("wan", "WanPipeline", prompted(**SIZE), TAGS)
def wan() -> DiffusionPipeline:
    """Text to video, one transformer."""
    return wan_pipeline("WanPipeline")


@register(
    "wan_two_stage",
    "WanPipeline",
    prompted(**SIZE, num_inference_steps=4, guidance_scale_2=3.0),
    TAGS + " two_denoisers",
)
def wan_two_stage() -> DiffusionPipeline:
    """Text to video, a second transformer for the low-noise steps."""
    return wan_pipeline("WanPipeline", transformer_2=tiny_wan(), boundary_ratio=0.875)


IMAGE_TAGS = TAGS + " clip_vision"
FROM_IMAGE = {**SIZE, "image": lambda: pil_image(16)}


def tiny_wan_image(**options: Any) -> diffusers.ModelMixin:
    """WanTransformer3DModel that also takes the first frame and its image embeddings."""
    return tiny_wan(**({"in_channels": 36, "image_dim": WIDTH} | options))


def wan_image_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Wan components with an image encoder."""
    defaults: dict[str, Any] = {
        "transformer": tiny_wan_image,
        "image_encoder": tiny_clip_vision,
        "image_processor": tiny_clip_image_processor,
    }
    return wan_pipeline(pipeline_class, **fill(defaults, components))


def tiny_vae_wan22() -> diffusers.ModelMixin:
    """AutoencoderKLWan as the 5B model has it: residual, patched, 16x in space."""
    return tiny_vae_wan(
        z_dim=48,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        patch_size=2,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
        scale_factor_spatial=16,
    )


add(
    "wan_5b",
    "WanPipeline",
    prompted(**{**SIZE, "height": 32, "width": 32}),
    TAGS,
    wan_pipeline,
    transformer=lambda: tiny_wan(in_channels=48, out_channels=48),
    vae=tiny_vae_wan22,
    expand_timesteps=lambda: True,
)
add("wan_image", "WanImageToVideoPipeline", prompted(**FROM_IMAGE), IMAGE_TAGS, wan_image_pipeline)
add(
    "wan_image_two_stage",
    "WanImageToVideoPipeline",
    prompted(**FROM_IMAGE, num_inference_steps=4, guidance_scale_2=3.0),
    TAGS + " two_denoisers",
    wan_pipeline,
    transformer=lambda: tiny_wan(in_channels=36),
    transformer_2=lambda: tiny_wan(in_channels=36),
    boundary_ratio=lambda: 0.875,
)
add(
    "wan_video",
    "WanVideoToVideoPipeline",
    prompted(**{**SIZE, "num_frames": DROP}, **IMG2IMG, video=lambda: frames(5, 16)),
    TAGS,
    wan_pipeline,
    scheduler=lambda: diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
)


def tiny_vace() -> diffusers.ModelMixin:
    """WanVACETransformer3DModel; two side blocks feed the four main ones."""
    return diffusers.WanVACETransformer3DModel(**wan_options(), vace_layers=[0, 2], vace_in_channels=96)


VACE = {**SIZE, "video": lambda: frames(5, 16), "mask": lambda: [mask_image(16)] * 5}

add("wan_vace", "WanVACEPipeline", prompted(**VACE), TAGS, wan_pipeline, transformer=tiny_vace)
add(
    "wan_vace_two_stage",
    "WanVACEPipeline",
    prompted(**VACE, num_inference_steps=4, guidance_scale_2=3.0),
    TAGS + " two_denoisers",
    wan_pipeline,
    transformer=tiny_vace,
    transformer_2=tiny_vace,
    boundary_ratio=lambda: 0.875,
)


def tiny_wan_animate() -> diffusers.ModelMixin:
    """WanAnimateTransformer3DModel with small motion and face encoders."""
    options = wan_options() | {"in_channels": 36, "latent_channels": 16, "image_dim": WIDTH}
    return diffusers.WanAnimateTransformer3DModel(
        **options,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


ANIMATE = {
    "height": 16,
    "width": 16,
    "max_sequence_length": 16,
    "negative_prompt": NEGATIVE,
    "image": lambda: pil_image(16),
    "pose_video": lambda: frames(5, 16),
    "face_video": lambda: frames(5, 16),
    "segment_frame_length": 5,
    "guidance_scale": 2.0,
}

add(
    "wan_animate",
    "WanAnimatePipeline",
    prompted(**ANIMATE),
    IMAGE_TAGS,
    wan_image_pipeline,
    transformer=tiny_wan_animate,
)
add(
    "lucy_edit",
    "LucyEditPipeline",
    prompted(**{**SIZE, "height": 32, "width": 32}, video=lambda: frames(5, 32)),
    TAGS,
    wan_pipeline,
    transformer=lambda: tiny_wan(in_channels=96, out_channels=48),
    vae=tiny_vae_wan22,
    expand_timesteps=lambda: True,
)
add(
    "chronoedit",
    "ChronoEditPipeline",
    prompted(**FROM_IMAGE),
    IMAGE_TAGS,
    wan_image_pipeline,
    transformer=lambda: diffusers.ChronoEditTransformer3DModel(
        **(wan_options() | {"in_channels": 36, "image_dim": WIDTH})
    ),
)


def tiny_skyreels(**options: Any) -> diffusers.ModelMixin:
    """SkyReelsV2Transformer3DModel of four blocks."""
    return diffusers.SkyReelsV2Transformer3DModel(**(wan_options() | options))


def skyreels_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of SkyReels components, which are Wan's but for the transformer."""
    defaults: dict[str, Any] = {
        "transformer": tiny_skyreels,
        "scheduler": lambda: diffusers.UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True),
    }
    return wan_pipeline(pipeline_class, **fill(defaults, components))


SKYREELS = {**SIZE, "num_frames": 9}
FORCING = {**SKYREELS, "overlap_history": None, "addnoise_condition": 0}

add("skyreels", "SkyReelsV2Pipeline", prompted(**SKYREELS), TAGS, skyreels_pipeline)
add("skyreels_forcing", "SkyReelsV2DiffusionForcingPipeline", prompted(**FORCING), TAGS, skyreels_pipeline)
add(
    "skyreels_image",
    "SkyReelsV2ImageToVideoPipeline",
    prompted(**SKYREELS, image=lambda: pil_image(16)),
    IMAGE_TAGS,
    skyreels_pipeline,
    transformer=lambda: tiny_skyreels(in_channels=36, image_dim=WIDTH),
    image_encoder=tiny_clip_vision,
    image_processor=tiny_clip_image_processor,
)
add(
    "skyreels_forcing_image",
    "SkyReelsV2DiffusionForcingImageToVideoPipeline",
    prompted(**FORCING, image=lambda: pil_image(16)),
    TAGS,
    skyreels_pipeline,
)
add(
    "skyreels_forcing_video",
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    prompted(**{**SKYREELS, "num_frames": 17, "base_num_frames": 9}, overlap_history=3, video=lambda: frames(9, 16)),
    TAGS,
    skyreels_pipeline,
)
