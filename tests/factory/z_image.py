"""Z-Image and HiDream: image transformers with language models."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow, tiny_vae_kl
from factory.core import KNOWN_BROKEN, add, fill, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, prompted
from factory.text import WIDTH, tiny_clip_text_projection, tiny_llama_lm, tiny_qwen3_model, tiny_t5
from factory.tokenizers import build_clip_tokenizer, build_llama_tokenizer, build_qwen2_tokenizer, build_t5_tokenizer

TAGS = "image dit qwen3"
SIZE = {"height": 32, "width": 32, "max_sequence_length": 32, "negative_prompt": NEGATIVE, "guidance_scale": 3.0}
IMAGE = {**SIZE, **IMG2IMG, "image": image_tensor}


def z_image_options() -> dict[str, Any]:
    """The configuration that the transformer shares with its ControlNet."""
    return {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 16,
        "dim": 32,
        "n_refiner_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "qk_norm": True,
    }


def tiny_z_image() -> diffusers.ModelMixin:
    """ZImageTransformer2DModel of four blocks and two refiner stacks."""
    transformer = diffusers.ZImageTransformer2DModel(
        **z_image_options(), n_layers=4, cap_feat_dim=WIDTH, axes_dims=[8, 4, 4], axes_lens=[256, 32, 32]
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # made of uninitialised memory
        token.data.normal_()
    return transformer


def z_image_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Z-Image components."""
    defaults = {
        "transformer": tiny_z_image,
        "vae": lambda: tiny_vae_flow(16, channels=(8, 16), use_quant_conv=True, use_post_quant_conv=True),
        "text_encoder": tiny_qwen3_model,
        "tokenizer": build_qwen2_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


add("z_image", "ZImagePipeline", prompted(**SIZE), TAGS, z_image_pipeline)
add("z_image_img2img", "ZImageImg2ImgPipeline", prompted(**IMAGE), TAGS, z_image_pipeline)
add("z_image_inpaint", "ZImageInpaintPipeline", prompted(**IMAGE, mask_image=mask_image), TAGS, z_image_pipeline)


@register(
    "hidream",
    "HiDreamImagePipeline",
    prompted(height=32, width=32, negative_prompt=NEGATIVE),
    "image dit clip t5 llama moe",
)
def hidream() -> DiffusionPipeline:
    """Text to image with four text encoders and routed experts."""
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=8,  # the pipeline always works on latents of 128x128
        in_channels=4,
        out_channels=4,
        num_layers=4,
        num_single_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[WIDTH, WIDTH],
        text_emb_dim=2 * WIDTH,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(128, 128),
        llama_layers=(0, 1, 2, 3, 4, 5, 6, 7),
    )
    return pipeline(
        "HiDreamImagePipeline",
        transformer=transformer,
        vae=tiny_vae_kl(channels=(4,), scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=tiny_clip_text_projection(max_position_embeddings=128),
        text_encoder_2=tiny_clip_text_projection(max_position_embeddings=128),
        text_encoder_3=tiny_t5(),
        text_encoder_4=tiny_llama_lm(),
        tokenizer=build_clip_tokenizer(),
        tokenizer_2=build_clip_tokenizer(),
        tokenizer_3=build_t5_tokenizer(128),
        tokenizer_4=build_llama_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


KNOWN_BROKEN["OmniGenPipeline"] = "needs torchvision"
