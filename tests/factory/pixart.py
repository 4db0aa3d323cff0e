"""PixArt, Latte, Allegro, AuraFlow and Mochi: transformers with a T5-like text encoder."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import NO_RELOAD, add, fill, pipeline, register
from factory.inputs import NEGATIVE, prompted
from factory.text import WIDTH, tiny_t5, tiny_umt5
from factory.tokenizers import build_t5_tokenizer

TAGS = "image dit t5"
SIZE = {"height": 16, "width": 16, "max_sequence_length": 16, "negative_prompt": NEGATIVE}
SQUARE = {**SIZE, "use_resolution_binning": False, "clean_caption": False}


def pixart_options() -> dict[str, Any]:
    """The configuration that the transformers of PixArt and Latte share."""
    return {
        "sample_size": 8,
        "num_layers": 4,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "caption_channels": WIDTH,
        "in_channels": 4,
        "cross_attention_dim": 24,
        "out_channels": 8,
        "attention_bias": True,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
    }


def pixart_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of PixArt components."""
    defaults = {
        "transformer": lambda: diffusers.PixArtTransformer2DModel(**pixart_options()),
        "vae": tiny_vae_kl,
        "text_encoder": tiny_t5,
        "tokenizer": build_t5_tokenizer,
        "scheduler": diffusers.DPMSolverMultistepScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


add("pixart_alpha", "PixArtAlphaPipeline", prompted(**SQUARE), TAGS, pixart_pipeline)
add("pixart_sigma", "PixArtSigmaPipeline", prompted(**SQUARE), TAGS, pixart_pipeline)
add(
    "latte",
    "LattePipeline",
    prompted(height=16, width=16, video_length=2, negative_prompt=NEGATIVE, clean_caption=False),
    "video dit t5",
    pixart_pipeline,
    transformer=lambda: diffusers.LatteTransformer3DModel(**pixart_options(), video_length=2),
    scheduler=diffusers.DDIMScheduler,
)


ALLEGRO_TAGS = f"video dit t5 tiling {NO_RELOAD}"  # a loaded pipeline does not know that its VAE works in tiles


@register(
    "allegro", "AllegroPipeline", prompted(**{**SIZE, "width": 32}, num_frames=8, clean_caption=False), ALLEGRO_TAGS
)
def allegro() -> DiffusionPipeline:
    """Text to video; its VAE only works in tiles."""
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=WIDTH,
    )
    vae = diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    vae.kernel, vae.stride = (8, 16, 16), (4, 8, 8)
    vae.enable_tiling()
    return pixart_pipeline("AllegroPipeline", transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler())


@register("auraflow", "AuraFlowPipeline", prompted(**{**SIZE, "max_sequence_length": 32}), "image dit umt5")
def auraflow() -> DiffusionPipeline:
    """Text to image; double blocks, then single ones."""
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=4,
        num_single_dit_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=WIDTH,
        out_channels=4,
        pos_embed_max_size=64,
    )
    return pixart_pipeline(
        "AuraFlowPipeline",
        transformer=transformer,
        text_encoder=tiny_umt5(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


@register("mochi", "MochiPipeline", prompted(**SIZE, num_frames=7), "video dit t5")
def mochi() -> DiffusionPipeline:
    """Text to video; the last block leaves the text stream out."""
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=4,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        max_sequence_length=16,
    )
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
    )
    return pixart_pipeline(
        "MochiPipeline",
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )
