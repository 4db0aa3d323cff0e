"""Unconditional and class-conditional pipelines, and latent diffusion."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import NO_RELOAD, add, pipeline, register
from factory.inputs import DROP, call, image_tensor, prompted
from factory.stable_diffusion import sd_scheduler
from factory.text import WIDTH
from factory.tokenizers import build_bert_tokenizer
from factory.unets import tiny_unet_sd

TAGS = "image pixel unet"


def tiny_unet_pixel(**options: Any) -> diffusers.ModelMixin:
    """UNet2DModel of two levels."""
    defaults = {
        "block_out_channels": (8, 16),
        "layers_per_block": 2,
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "norm_num_groups": 4,
        "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return diffusers.UNet2DModel(**(defaults | options))


def pixel_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of a UNet and a scheduler."""
    return pipeline(pipeline_class, **({"unet": tiny_unet_pixel()} | components))


ARRAY = {"output_type": "np"}

add("ddpm", "DDPMPipeline", call(**ARRAY), TAGS, pixel_pipeline, scheduler=diffusers.DDPMScheduler)
add("ddim", "DDIMPipeline", call(**ARRAY, eta=0.5), TAGS, pixel_pipeline, scheduler=diffusers.DDIMScheduler)
add(
    "pndm",
    "PNDMPipeline",
    call(**ARRAY, num_inference_steps=5),
    TAGS,
    pixel_pipeline,
    scheduler=diffusers.PNDMScheduler,
)
add(
    "score_sde_ve",
    "ScoreSdeVePipeline",
    call(**ARRAY),
    TAGS,
    pixel_pipeline,
    scheduler=diffusers.ScoreSdeVeScheduler,
)
add(
    "karras_ve",
    "KarrasVePipeline",
    call(**ARRAY),
    f"{TAGS} {NO_RELOAD}",
    pixel_pipeline,
    scheduler=diffusers.KarrasVeScheduler,
)
add(
    "repaint",
    "RePaintPipeline",
    call(
        **ARRAY,
        image=lambda: image_tensor(16),
        mask_image=lambda: image_tensor(16, 1).round(),
        num_inference_steps=4,
        jump_length=2,
        jump_n_sample=2,
    ),
    TAGS,
    pixel_pipeline,
    scheduler=diffusers.RePaintScheduler,
)
add(
    "consistency",
    "ConsistencyModelPipeline",
    call(timesteps=[22, 0], num_inference_steps=DROP),
    TAGS,
    pixel_pipeline,
    scheduler=lambda: diffusers.CMStochasticIterativeScheduler(num_train_timesteps=40),
)


@register("dit", "DiTPipeline", call(output_type="np", class_labels=[1]), "image dit")
def dit() -> DiffusionPipeline:
    """Class label to image."""
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=8,
        num_layers=4,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    return pipeline(
        "DiTPipeline",
        transformer=transformer,
        vae=tiny_vae_kl(),
        scheduler=diffusers.DDIMScheduler(),
        id2label={"1": "fox"},
    )


def tiny_vq() -> diffusers.ModelMixin:
    """VQModel."""
    return diffusers.VQModel(
        block_out_channels=[8, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=3,
        norm_num_groups=4,
        num_vq_embeddings=32,
    )


@register(
    "ldm_upscale", "LDMSuperResolutionPipeline", call(output_type="np", image=lambda: image_tensor(16)), "image unet vq"
)
def ldm_upscale() -> DiffusionPipeline:
    """Image to a larger image, in the latents of a VQ model."""
    return pixel_pipeline(
        "LDMSuperResolutionPipeline",
        unet=tiny_unet_pixel(in_channels=6),
        vqvae=tiny_vq(),
        scheduler=diffusers.DDIMScheduler(),
    )


@register("ldm", "LDMPipeline", call(output_type="np"), "image unet vq")
def ldm() -> DiffusionPipeline:
    """Unconditional, in the latents of a VQ model."""
    return pixel_pipeline("LDMPipeline", vqvae=tiny_vq(), scheduler=diffusers.DDIMScheduler())


@register(
    "ldm_text",
    "LDMTextToImagePipeline",
    prompted(output_type="np", height=32, width=32, guidance_scale=6.0),
    "image unet ldmbert",
)
def ldm_text() -> DiffusionPipeline:
    """Text to image with the text encoder of latent diffusion."""
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

    config = LDMBertConfig(
        vocab_size=1024, encoder_layers=8, encoder_ffn_dim=40, encoder_attention_heads=4, head_dim=8, d_model=WIDTH
    )
    return pipeline(
        "LDMTextToImagePipeline",
        unet=tiny_unet_sd(),
        vqvae=tiny_vae_kl(),
        bert=LDMBertModel(config),
        tokenizer=build_bert_tokenizer(),
        scheduler=sd_scheduler(),
    )
