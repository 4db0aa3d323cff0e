"""Stable Cascade and Wuerstchen."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from factory.core import NO_RELOAD, pipeline, register
from factory.inputs import NEGATIVE, prompted
from factory.text import WIDTH, tiny_clip_text, tiny_clip_text_projection
from factory.tokenizers import build_clip_tokenizer


def tiny_cascade_prior() -> diffusers.ModelMixin:
    """StableCascadeUNet of the first stage."""
    return diffusers.StableCascadeUNet(
        conditioning_dim=WIDTH,
        block_out_channels=(32, 32),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(2, 2),
        up_num_layers_per_block=(2, 2),
        switch_level=(False,),
        clip_image_in_channels=WIDTH,
        clip_text_in_channels=WIDTH,
        clip_text_pooled_in_channels=WIDTH,
        dropout=(0.1, 0.1),
    )


def tiny_cascade_decoder(effnet_in_channels: int = 4) -> diffusers.ModelMixin:
    """StableCascadeUNet of the second stage."""
    plain, attention = ["SDCascadeResBlock", "SDCascadeTimestepBlock"], ["SDCascadeAttnBlock"]
    return diffusers.StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=WIDTH,
        block_out_channels=(8, 16, 32, 32),
        num_attention_heads=(-1, -1, 1, 2),
        down_num_layers_per_block=(1, 2, 2, 1),
        up_num_layers_per_block=(1, 2, 2, 1),
        down_blocks_repeat_mappers=(1, 1, 1, 1),
        up_blocks_repeat_mappers=(3, 3, 2, 2),
        block_types_per_layer=(plain, plain, plain + attention, plain + attention),
        switch_level=None,
        clip_text_pooled_in_channels=WIDTH,
        effnet_in_channels=effnet_in_channels,
        dropout=(0.1, 0.1, 0.1, 0.1),
    )


def _text() -> dict[str, Any]:
    return {"text_encoder": tiny_clip_text_projection(), "tokenizer": build_clip_tokenizer()}


def embeddings() -> torch.Tensor:
    """What the prior would hand to the decoder."""
    return torch.linspace(-1.0, 1.0, 64).reshape(1, 4, 4, 4)


@register(
    "stable_cascade_prior",
    "StableCascadePriorPipeline",
    prompted(height=128, width=128, negative_prompt=NEGATIVE, guidance_scale=4.0),
    "prior unet clip",
)
def stable_cascade_prior() -> DiffusionPipeline:
    """Text to image embeddings."""
    return pipeline(
        "StableCascadePriorPipeline",
        prior=tiny_cascade_prior(),
        scheduler=diffusers.DDPMWuerstchenScheduler(),
        **_text(),
    )


@register(
    "stable_cascade_decoder",
    "StableCascadeDecoderPipeline",
    prompted(image_embeddings=embeddings, negative_prompt=NEGATIVE, guidance_scale=2.0),
    f"image unet clip {NO_RELOAD}",  # model_index.json names PaellaVQModel as if diffusers exported it
)
def stable_cascade_decoder() -> DiffusionPipeline:
    """Image embeddings to image; blocks are repeated within a pass."""
    return pipeline(
        "StableCascadeDecoderPipeline",
        decoder=tiny_cascade_decoder(),
        vqgan=tiny_paella(),
        scheduler=diffusers.DDPMWuerstchenScheduler(),
        latent_dim_scale=4.0,
        **_text(),
    )


def tiny_paella() -> diffusers.ModelMixin:
    """PaellaVQModel."""
    from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel

    return PaellaVQModel(bottleneck_blocks=2, num_vq_embeddings=16, embed_dim=16)


PASSES = {"prior_num_inference_steps": 2, "prior_guidance_scale": 4.0, "height": 128, "width": 128}


@register(
    "stable_cascade_combined",
    "StableCascadeCombinedPipeline",
    prompted(**PASSES, decoder_guidance_scale=2.0),
    f"image unet prior clip {NO_RELOAD} idle:text_encoder",
)
def stable_cascade_combined() -> DiffusionPipeline:
    """Prior and decoder in one."""
    return pipeline(
        "StableCascadeCombinedPipeline",
        prior_prior=tiny_cascade_prior(),
        prior_text_encoder=tiny_clip_text_projection(),
        prior_tokenizer=build_clip_tokenizer(),
        prior_scheduler=diffusers.DDPMWuerstchenScheduler(),
        decoder=tiny_cascade_decoder(16),
        vqgan=tiny_paella(),
        scheduler=diffusers.DDPMWuerstchenScheduler(),
        **_text(),
    )


def tiny_wuerstchen_prior() -> diffusers.ModelMixin:
    """WuerstchenPrior."""
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenPrior

    return WuerstchenPrior(c_in=4, c=16, depth=4, c_cond=WIDTH, c_r=8, nhead=2)


def tiny_wuerstchen_decoder() -> diffusers.ModelMixin:
    """WuerstchenDiffNeXt of one level."""
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenDiffNeXt

    return WuerstchenDiffNeXt(
        c_cond=WIDTH,
        c_hidden=[32],
        nhead=[2],
        blocks=[4],
        level_config=["CTA"],
        clip_embd=WIDTH,
        inject_effnet=[True],
        effnet_embd=4,
    )


@register(
    "wuerstchen_prior",
    "WuerstchenPriorPipeline",
    prompted(height=128, width=128, guidance_scale=4.0),
    f"prior clip {NO_RELOAD}",
)
def wuerstchen_prior() -> DiffusionPipeline:
    """Text to image embeddings."""
    return pipeline(
        "WuerstchenPriorPipeline",
        prior=tiny_wuerstchen_prior(),
        text_encoder=tiny_clip_text(),
        tokenizer=build_clip_tokenizer(),
        scheduler=diffusers.DDPMWuerstchenScheduler(),
        latent_mean=42.0,
        latent_std=1.0,
    )


def _wuerstchen_decoder() -> dict[str, Any]:
    return {
        "decoder": tiny_wuerstchen_decoder(),
        "vqgan": tiny_paella(),
        "text_encoder": tiny_clip_text(),
        "tokenizer": build_clip_tokenizer(),
        "scheduler": diffusers.DDPMWuerstchenScheduler(),
    }


@register(
    "wuerstchen_decoder",
    "WuerstchenDecoderPipeline",
    prompted(image_embeddings=embeddings, guidance_scale=2.0, negative_prompt=NEGATIVE),
    f"image unet clip {NO_RELOAD}",
)
def wuerstchen_decoder() -> DiffusionPipeline:
    """Image embeddings to image."""
    return pipeline("WuerstchenDecoderPipeline", latent_dim_scale=4.0, **_wuerstchen_decoder())


@register(
    "wuerstchen_combined",
    "WuerstchenCombinedPipeline",
    prompted(**PASSES, decoder_guidance_scale=2.0, negative_prompt=NEGATIVE),
    f"image unet prior clip {NO_RELOAD}",
)
def wuerstchen_combined() -> DiffusionPipeline:
    """Prior and decoder in one."""
    return pipeline(
        "WuerstchenCombinedPipeline",
        prior_prior=tiny_wuerstchen_prior(),
        prior_text_encoder=tiny_clip_text(),
        prior_tokenizer=build_clip_tokenizer(),
        prior_scheduler=diffusers.DDPMWuerstchenScheduler(),
        **_wuerstchen_decoder(),
    )
