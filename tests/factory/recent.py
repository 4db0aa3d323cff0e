"""Recent image transformers: Bria, PRX, Ovis, Krea and Nucleus."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow, tiny_vae_qwen
from factory.core import NO_RELOAD, pipeline, register
from factory.inputs import NEGATIVE, prompted
from factory.multimodal import VisionLanguageProcessor, tiny_qwen3_vl
from factory.text import LAYERS, WIDTH, decoder_options, tiny_qwen3_model, tiny_t5
from factory.tokenizers import build_gemma_tokenizer, build_qwen2_tokenizer, build_t5_tokenizer

SIZE = {"height": 32, "width": 32, "negative_prompt": NEGATIVE, "guidance_scale": 3.0}
SHORT = {**SIZE, "max_sequence_length": 32}


def flow() -> diffusers.SchedulerMixin:
    """The usual flow-matching schedule."""
    return diffusers.FlowMatchEulerDiscreteScheduler()


@register("bria", "BriaPipeline", prompted(**SHORT), "image dit t5")
def bria() -> DiffusionPipeline:
    """Text to image."""
    transformer = diffusers.BriaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=None,
        axes_dims_rope=[0, 4, 4],
    )
    return pipeline(
        "BriaPipeline",
        transformer=transformer,
        vae=tiny_vae_flow(channels=(8, 16), shift_factor=0.0),
        text_encoder=tiny_t5(),
        tokenizer=build_t5_tokenizer(),
        scheduler=flow(),
    )


def tiny_t5_gemma() -> transformers.PreTrainedModel:
    """T5GemmaEncoder."""
    from transformers.models.t5gemma import T5GemmaConfig, T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    options = decoder_options({"sliding_window": 16})
    config = T5GemmaConfig(encoder=T5GemmaModuleConfig(**options), is_encoder_decoder=False, **options)
    return T5GemmaEncoder(config.encoder)


@register("prx", "PRXPipeline", prompted(**SIZE, use_resolution_binning=False), f"image dit t5gemma {NO_RELOAD}")
def prx() -> DiffusionPipeline:
    """Text to image."""
    transformer = diffusers.PRXTransformer2DModel(
        patch_size=1,
        in_channels=4,
        context_in_dim=WIDTH,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=4,
        axes_dim=[4, 4],
    )
    return pipeline(
        "PRXPipeline",
        transformer=transformer,
        vae=tiny_vae_flow(channels=(8, 8, 8, 16)),
        text_encoder=tiny_t5_gemma(),
        tokenizer=build_gemma_tokenizer(32),
        scheduler=flow(),
    )


@register("ovis", "OvisImagePipeline", prompted(**SHORT), "image dit qwen3")
def ovis() -> DiffusionPipeline:
    """Text to image."""
    transformer = diffusers.OvisImageTransformer2DModel(
        patch_size=1,
        in_channels=16,
        out_channels=16,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return pipeline(
        "OvisImagePipeline",
        transformer=transformer,
        vae=tiny_vae_flow(channels=(8, 16)),
        text_encoder=tiny_qwen3_model(),
        tokenizer=build_qwen2_tokenizer(),
        scheduler=flow(),
    )


@register("krea2", "Krea2Pipeline", prompted(**SHORT), "image dit qwen3_vl")
def krea2() -> DiffusionPipeline:
    """Text to image; the transformer has text stacks of its own."""
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        timestep_embed_dim=8,
        text_hidden_dim=WIDTH,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=2,
        text_intermediate_size=40,
        num_layerwise_text_blocks=2,
        num_refiner_text_blocks=2,
        axes_dims_rope=(4, 2, 2),
        rope_theta=1000.0,
    )
    return pipeline(
        "Krea2Pipeline",
        transformer=transformer,
        vae=tiny_vae_qwen(),
        text_encoder=tiny_qwen3_vl(base=True),
        tokenizer=build_qwen2_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        text_encoder_select_layers=(2, 5, LAYERS),
    )


NUCLEUS: dict[str, Any] = {**SHORT, "return_index": -1}


@register("nucleus", "NucleusMoEImagePipeline", prompted(**NUCLEUS), f"image dit qwen3_vl moe {NO_RELOAD}")
def nucleus() -> DiffusionPipeline:
    """Text to image with routed experts."""
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 4, 4),
        moe_enabled=True,
        dense_moe_strategy="leave_first_two_layers_dense",
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=[2.0] * 4,
        use_grouped_mm=False,
    )
    for name, parameter in transformer.named_parameters():
        if ".experts." in name:  # made of uninitialised memory
            parameter.data.normal_(std=0.1)
    return pipeline(
        "NucleusMoEImagePipeline",
        transformer=transformer,
        vae=tiny_vae_qwen(),
        text_encoder=tiny_qwen3_vl(),
        processor=VisionLanguageProcessor(),
        scheduler=flow(),
    )
