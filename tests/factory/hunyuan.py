"""HunyuanVideo and HunyuanImage."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_hunyuan
from factory.core import add, fill, pipeline, register
from factory.inputs import NEGATIVE, PROMPT, pil_image, prompted
from factory.multimodal import tiny_qwen2_5_vl, tiny_qwen2_5_vl_text
from factory.text import WIDTH, decoder_options, tiny_clip_text, tiny_llama, tiny_t5
from factory.tokenizers import build_clip_tokenizer, build_llama_tokenizer, build_qwen2_tokenizer
from factory.vision import tiny_clip_image_processor, tiny_siglip_image_processor, tiny_siglip_vision

TAGS = "video dit llama clip"
SIZE = {
    "height": 16,
    "width": 16,
    "num_frames": 5,
    "max_sequence_length": 16,
    "prompt_template": {"template": "describe the video: {}", "crop_start": 4},
}


def hunyuan_video_options() -> dict[str, Any]:
    """The configuration that the transformers of the family share."""
    return {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 4,
        "num_single_layers": 4,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "rope_axes_dim": (2, 4, 4),
    }


def tiny_hunyuan_video(**options: Any) -> diffusers.ModelMixin:
    """HunyuanVideoTransformer3DModel with four double and four single blocks."""
    return diffusers.HunyuanVideoTransformer3DModel(**(hunyuan_video_options() | options))


def hunyuan_video_components(**components: Any) -> dict[str, Any]:
    """Components of a HunyuanVideo pipeline; arguments replace or add some."""
    defaults: dict[str, Any] = {
        "transformer": tiny_hunyuan_video,
        "vae": tiny_vae_hunyuan,
        "text_encoder": tiny_llama,
        "text_encoder_2": tiny_clip_text,
        "tokenizer": build_llama_tokenizer,
        "tokenizer_2": build_clip_tokenizer,
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return fill(defaults, components)


def hunyuan_video_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of HunyuanVideo components."""
    return pipeline(pipeline_class, **hunyuan_video_components(**components))


@register("hunyuan_video", "HunyuanVideoPipeline", prompted(**SIZE), TAGS)
def hunyuan_video() -> DiffusionPipeline:
    """Text to video."""
    return hunyuan_video_pipeline("HunyuanVideoPipeline")


def tiny_llava() -> transformers.PreTrainedModel:
    """LlavaForConditionalGeneration; an image is 16 tokens, and a class token that is left out."""
    image_token = build_llava_tokenizer().convert_tokens_to_ids("<image>")
    text = transformers.LlamaConfig(**decoder_options({"pad_token_id": 3}))
    vision = transformers.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=40,
        num_attention_heads=4,
        num_hidden_layers=4,
        image_size=32,
        patch_size=8,
        projection_dim=WIDTH,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image_token, pad_token_id=3
    )
    return transformers.LlavaForConditionalGeneration(config)


LLAVA_SPECIALS = ("<image>", "<|end_header_id|>")
LLAVA_TEMPLATE = "system<|end_header_id|>describe<image>video<|end_header_id|>{}<|end_header_id|>"


def build_llava_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """LlamaTokenizer with the tokens that the image template needs."""
    return build_llama_tokenizer(extra=LLAVA_SPECIALS)


def image_template() -> dict[str, Any]:
    """The template of a prompt with an image, and where its parts begin and end."""
    tokens = build_llava_tokenizer().tokenize(LLAVA_TEMPLATE)
    image = tokens.index("<image>")
    second_header = tokens.index("<|end_header_id|>", image)
    return {
        "template": LLAVA_TEMPLATE,
        "crop_start": second_header + 1,
        "image_emb_len": 16,
        "image_emb_start": image,
        "image_emb_end": image + 16,
        "double_return_token_id": 1000,
    }


add(
    "hunyuan_video_image",
    "HunyuanVideoImageToVideoPipeline",
    prompted(
        **{**SIZE, "prompt_template": image_template, "max_sequence_length": 48, "num_frames": 9},
        image=lambda: pil_image(16),
    ),
    TAGS + " llava",
    hunyuan_video_pipeline,
    transformer=lambda: tiny_hunyuan_video(in_channels=9, guidance_embeds=False, image_condition_type="latent_concat"),
    text_encoder=tiny_llava,
    tokenizer=build_llava_tokenizer,
    image_processor=tiny_clip_image_processor,
)
add(
    "hunyuan_skyreels_image",
    "HunyuanSkyreelsImageToVideoPipeline",
    prompted(**SIZE, image=lambda: pil_image(16), negative_prompt=NEGATIVE, true_cfg_scale=2.0),
    TAGS,
    hunyuan_video_pipeline,
    transformer=lambda: tiny_hunyuan_video(in_channels=8),
)


def tiny_framepack() -> diffusers.ModelMixin:
    """HunyuanVideoFramepackTransformer3DModel with four double and four single blocks."""
    return diffusers.HunyuanVideoFramepackTransformer3DModel(
        **(hunyuan_video_options() | {"patch_size": 2}),
        image_condition_type=None,
        has_image_proj=True,
        image_proj_dim=WIDTH,
        has_clean_x_embedder=True,
    )


add(
    "hunyuan_framepack",
    "HunyuanVideoFramepackPipeline",
    prompted(**{**SIZE, "height": 32, "width": 32, "num_frames": 9}, image=pil_image, latent_window_size=3),
    TAGS + " siglip",
    hunyuan_video_pipeline,
    transformer=tiny_framepack,
    image_encoder=tiny_siglip_vision,
    feature_extractor=tiny_siglip_image_processor,
)


def tiny_hunyuan_video15(**options: Any) -> diffusers.ModelMixin:
    """HunyuanVideo15Transformer3DModel of four blocks."""
    defaults: dict[str, Any] = {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 4,
        "num_refiner_layers": 2,
        "mlp_ratio": 2.0,
        "patch_size": 1,
        "patch_size_t": 1,
        "text_embed_dim": WIDTH,
        "text_embed_2_dim": WIDTH,
        "image_embed_dim": WIDTH,
        "rope_axes_dim": (2, 2, 4),
        "target_size": 16,
        "task_type": "t2v",
    }
    return diffusers.HunyuanVideo15Transformer3DModel(**(defaults | options))


def hunyuan_video15_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of HunyuanVideo 1.5 components."""
    defaults: dict[str, Any] = {
        "transformer": tiny_hunyuan_video15,
        "vae": lambda: diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "text_encoder": tiny_qwen2_5_vl_text,
        "text_encoder_2": tiny_t5,
        "tokenizer": lambda: build_qwen2_tokenizer(1024),
        "tokenizer_2": transformers.ByT5Tokenizer,
        "guider": lambda: diffusers.guiders.ClassifierFreeGuidance(guidance_scale=2.0),
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return pipeline(pipeline_class, **fill(defaults, components))


TAGS_15 = "video dit qwen2_5_vl t5"
SIZE_15 = {"num_frames": 5, "negative_prompt": NEGATIVE, "prompt": f'{PROMPT} that says "fox"'}

add(
    "hunyuan_video15",
    "HunyuanVideo15Pipeline",
    prompted(**SIZE_15, height=16, width=16),
    TAGS_15,
    hunyuan_video15_pipeline,
)
add(
    "hunyuan_video15_image",
    "HunyuanVideo15ImageToVideoPipeline",
    prompted(**SIZE_15, image=lambda: pil_image(16)),
    TAGS_15 + " siglip",
    hunyuan_video15_pipeline,
    transformer=lambda: tiny_hunyuan_video15(task_type="i2v"),
    image_encoder=tiny_siglip_vision,
    feature_extractor=tiny_siglip_image_processor,
)


def tiny_hunyuan_image(**options: Any) -> diffusers.ModelMixin:
    """HunyuanImageTransformer2DModel with four double and four single blocks."""
    defaults: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": 4,
        "num_single_layers": 4,
        "num_refiner_layers": 2,
        "patch_size": (1, 1),
        "guidance_embeds": False,
        "text_embed_dim": WIDTH,
        "text_embed_2_dim": WIDTH,
        "rope_axes_dim": (4, 4),
    }
    return diffusers.HunyuanImageTransformer2DModel(**(defaults | options))


def hunyuan_image_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of HunyuanImage components."""
    guider = diffusers.guiders.AdaptiveProjectedMixGuidance
    defaults: dict[str, Any] = {
        "transformer": tiny_hunyuan_image,
        "vae": lambda: diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            sample_size=128,
        ),
        "text_encoder": tiny_qwen2_5_vl,
        "text_encoder_2": tiny_t5,
        "tokenizer": lambda: build_qwen2_tokenizer(1024),
        "tokenizer_2": transformers.ByT5Tokenizer,
        "guider": lambda: guider(adaptive_projected_guidance_start_step=2),
        "ocr_guider": lambda: guider(adaptive_projected_guidance_start_step=3),
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return pipeline(pipeline_class, **fill(defaults, components))


add(
    "hunyuan_image",
    "HunyuanImagePipeline",
    prompted(prompt=SIZE_15["prompt"], height=16, width=16, negative_prompt=NEGATIVE),
    "image dit qwen2_5_vl t5",
    hunyuan_image_pipeline,
)
