"""Lumina-Next and Lumina 2."""

from __future__ import annotations

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow, tiny_vae_kl
from factory.core import pipeline, register
from factory.inputs import NEGATIVE, prompted
from factory.text import WIDTH, tiny_gemma, tiny_gemma2
from factory.tokenizers import build_gemma_tokenizer

SIZE = {"height": 32, "width": 32, "max_sequence_length": 32, "negative_prompt": NEGATIVE}


@register("lumina2", "Lumina2Pipeline", prompted(**SIZE), "image dit gemma2")
def lumina2() -> DiffusionPipeline:
    """Text to image; refiner stacks beside the main stack."""
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=4,
        num_refiner_layers=2,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        scaling_factor=1.0,
        axes_dim_rope=[4, 2, 2],
        cap_feat_dim=WIDTH,
    )
    return pipeline(
        "Lumina2Pipeline",
        transformer=transformer,
        vae=tiny_vae_flow(channels=(8, 8, 8, 16)),
        text_encoder=tiny_gemma2(),
        tokenizer=build_gemma_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


@register("lumina", "LuminaPipeline", prompted(**SIZE), "image dit gemma")
def lumina() -> DiffusionPipeline:
    """Text to image with the first Lumina transformer."""
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=4,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=4,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        norm_eps=1e-5,
        learn_sigma=True,
        qk_norm=True,
        cross_attention_dim=WIDTH,
        scaling_factor=1.0,
    )
    transformer.pad_token.data.normal_()  # made of uninitialised memory
    return pipeline(
        "LuminaPipeline",
        transformer=transformer,
        vae=tiny_vae_kl(channels=(8, 8, 8, 16)),
        text_encoder=tiny_gemma(),
        tokenizer=build_gemma_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
