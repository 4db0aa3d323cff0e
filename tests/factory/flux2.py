"""Flux.2 and Chroma."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow
from factory.core import KNOWN_BROKEN, add, fill, pipeline
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, pil_image, prompted
from factory.multimodal import PIXTRAL_SPECIALS, tiny_mistral3
from factory.text import WIDTH, tiny_qwen3, tiny_t5
from factory.tokenizers import build_llama_tokenizer, build_qwen2_tokenizer, build_t5_tokenizer

SIZE = {"height": 16, "width": 16, "max_sequence_length": 64}
LAYERS_OUT = {"text_encoder_out_layers": (2, 5)}


def tiny_flux2(**options: Any) -> diffusers.ModelMixin:
    """Flux2Transformer2DModel with four double and four single blocks."""
    defaults = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 4,
        "num_single_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 2 * WIDTH,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": [4, 4, 4, 4],
    }
    return diffusers.Flux2Transformer2DModel(**(defaults | options))


def tiny_vae_flux2() -> diffusers.ModelMixin:
    """AutoencoderKLFlux2; its batch norm is read from outside of forward."""
    return diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )


def flux2_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Flux.2 Klein components."""
    defaults = {
        "transformer": lambda: tiny_flux2(guidance_embeds=False),
        "vae": tiny_vae_flux2,
        "text_encoder": tiny_qwen3,
        "tokenizer": build_qwen2_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


add(
    "flux2",
    "Flux2Pipeline",
    prompted(**SIZE, **LAYERS_OUT),
    "image dit mistral3",
    flux2_pipeline,
    transformer=tiny_flux2,
    text_encoder=tiny_mistral3,
    tokenizer=lambda: build_llama_tokenizer(extra=PIXTRAL_SPECIALS),
)
add("flux2_klein", "Flux2KleinPipeline", prompted(**SIZE, **LAYERS_OUT), "image dit qwen3", flux2_pipeline)
add(
    "flux2_klein_image",
    "Flux2KleinPipeline",
    prompted(**SIZE, **LAYERS_OUT, image=lambda: pil_image(64)),
    "image dit qwen3",
    flux2_pipeline,
)
add(
    "flux2_klein_inpaint",
    "Flux2KleinInpaintPipeline",
    prompted(**SIZE, **LAYERS_OUT, **IMG2IMG, image=lambda: image_tensor(16), mask_image=lambda: mask_image(16)),
    "image dit qwen3",
    flux2_pipeline,
)
add(
    "flux2_klein_kv",
    "Flux2KleinKVPipeline",
    prompted(**SIZE, **LAYERS_OUT, image=lambda: pil_image(64)),
    "image dit qwen3",
    flux2_pipeline,
)


def tiny_chroma() -> diffusers.ModelMixin:
    """ChromaTransformer2DModel with four double and four single blocks."""
    return diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=[4, 4, 8],
        approximator_hidden_dim=32,
        approximator_layers=2,
        approximator_num_channels=16,
    )


def chroma_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Chroma components."""
    defaults = {
        "transformer": tiny_chroma,
        "vae": lambda: tiny_vae_flow(channels=(8, 16)),
        "text_encoder": tiny_t5,
        "tokenizer": build_t5_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


CHROMA = {"height": 16, "width": 16, "max_sequence_length": 32, "negative_prompt": NEGATIVE}
CHROMA_IMAGE = {**CHROMA, **IMG2IMG, "image": lambda: image_tensor(16)}

add("chroma", "ChromaPipeline", prompted(**CHROMA), "image dit t5", chroma_pipeline)
add("chroma_img2img", "ChromaImg2ImgPipeline", prompted(**CHROMA_IMAGE), "image dit t5", chroma_pipeline)

KNOWN_BROKEN["ChromaInpaintPipeline"] = (
    "reads transformer.config.guidance_embeds, which Chroma's transformer does not have"
)
