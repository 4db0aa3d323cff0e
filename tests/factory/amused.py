"""Amused: masked tokens instead of noise."""

from __future__ import annotations

import diffusers
from diffusers import DiffusionPipeline

from factory.core import add, pipeline
from factory.inputs import NEGATIVE, mask_image, pil_image, prompted
from factory.text import WIDTH, tiny_clip_text_projection
from factory.tokenizers import build_clip_tokenizer


def amused_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline of Amused components."""
    transformer = diffusers.UVit2DModel(
        hidden_size=16,
        cond_embed_dim=WIDTH,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=WIDTH,
        vocab_size=32,
        codebook_size=16,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=2,
        downsample=True,
        upsample=True,
        block_num_heads=2,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
    )
    vqvae = diffusers.VQModel(
        block_out_channels=[8, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=8,
        norm_num_groups=8,
        num_vq_embeddings=16,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
    )
    return pipeline(
        pipeline_class,
        transformer=transformer,
        vqvae=vqvae,
        text_encoder=tiny_clip_text_projection(),
        tokenizer=build_clip_tokenizer(),
        scheduler=diffusers.AmusedScheduler(mask_token_id=31),
    )


TAGS = "image tokens clip"
TEXT = {"negative_prompt": NEGATIVE, "guidance_scale": 4.0}
EDIT = {**TEXT, "image": pil_image, "num_inference_steps": 3, "strength": 0.7}

add("amused", "AmusedPipeline", prompted(**TEXT, height=32, width=32), TAGS, amused_pipeline)
add("amused_img2img", "AmusedImg2ImgPipeline", prompted(**EDIT), TAGS, amused_pipeline)
add("amused_inpaint", "AmusedInpaintPipeline", prompted(**EDIT, mask_image=mask_image), TAGS, amused_pipeline)
