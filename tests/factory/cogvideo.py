"""CogVideoX, CogView and ConsisID."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_cogvideo, tiny_vae_kl
from factory.core import KNOWN_BROKEN, add, fill, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, frames, image_tensor, pil_image, prompted
from factory.text import WIDTH, decoder_options, tiny_t5
from factory.tokenizers import build_llama_tokenizer, build_t5_tokenizer

TAGS = "video dit t5"
SIZE = {"height": 16, "width": 16, "num_frames": 9, "max_sequence_length": 16, "negative_prompt": NEGATIVE}


def cogvideo_options() -> dict[str, Any]:
    """The configuration that the transformers of the CogVideoX family share."""
    return {
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": WIDTH,
        "num_layers": 4,
        "sample_width": 2,
        "sample_height": 2,
        "sample_frames": 9,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 16,
    }


def cogvideo_components(**components: Any) -> dict[str, Any]:
    """Components of a CogVideoX pipeline; arguments replace or add some."""
    defaults: dict[str, Any] = {
        "transformer": lambda: diffusers.CogVideoXTransformer3DModel(**cogvideo_options()),
        "vae": tiny_vae_cogvideo,
        "text_encoder": tiny_t5,
        "tokenizer": build_t5_tokenizer,
        "scheduler": diffusers.CogVideoXDDIMScheduler,
    }
    return fill(defaults, components)


@register("cogvideox", "CogVideoXPipeline", prompted(**SIZE), TAGS)
def cogvideox() -> DiffusionPipeline:
    """Text to video."""
    return pipeline("CogVideoXPipeline", **cogvideo_components())


def cogvideo_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of CogVideoX components."""
    return pipeline(pipeline_class, **cogvideo_components(**components))


def tiny_cogvideo_wide() -> diffusers.ModelMixin:
    """CogVideoXTransformer3DModel that takes control or image latents beside its own."""
    return diffusers.CogVideoXTransformer3DModel(**(cogvideo_options() | {"in_channels": 8}))


ROTARY = {
    "in_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "use_rotary_positional_embeddings": True,
    "use_learned_positional_embeddings": True,
}
TEXT = {name: value for name, value in SIZE.items() if name != "num_frames"}

add(
    "cogvideox_control",
    "CogVideoXFunControlPipeline",
    prompted(**TEXT, control_video=lambda: frames(9, 16)),
    TAGS,
    cogvideo_pipeline,
    transformer=tiny_cogvideo_wide,
)
add(
    "cogvideox_image",
    "CogVideoXImageToVideoPipeline",
    prompted(**SIZE, image=lambda: pil_image(16)),
    TAGS,
    cogvideo_pipeline,
    transformer=lambda: diffusers.CogVideoXTransformer3DModel(**(cogvideo_options() | ROTARY)),
)
add(
    "cogvideox_video",
    "CogVideoXVideoToVideoPipeline",
    prompted(**TEXT, **IMG2IMG, video=lambda: frames(9, 16)),
    TAGS,
    cogvideo_pipeline,
)


KNOWN_BROKEN["ConsisIDPipeline"] = "needs OpenCV"


def tiny_glm() -> transformers.PreTrainedModel:
    """GlmModel."""
    return transformers.GlmModel(transformers.GlmConfig(**decoder_options({})))


def tiny_cogview4(in_channels: int = 4) -> diffusers.ModelMixin:
    """CogView4Transformer2DModel of four blocks."""
    return diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=in_channels,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
    )


def cogview_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of CogView components."""
    defaults: dict[str, Any] = {
        "transformer": tiny_cogview4,
        "vae": tiny_vae_kl,
        "text_encoder": tiny_glm,
        "tokenizer": lambda: build_llama_tokenizer(padding_side="left"),
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
        ),
    }
    return pipeline(pipeline_class, **fill(defaults, components))


def tiny_cogview3() -> diffusers.ModelMixin:
    """CogView3PlusTransformer2DModel of four blocks."""
    return diffusers.CogView3PlusTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    )


VIEW = {"height": 16, "width": 16, "max_sequence_length": 16, "negative_prompt": NEGATIVE}

add(
    "cogview3",
    "CogView3PlusPipeline",
    prompted(**VIEW),
    "image dit t5",
    cogview_pipeline,
    transformer=tiny_cogview3,
    text_encoder=tiny_t5,
    tokenizer=build_t5_tokenizer,
    scheduler=diffusers.CogVideoXDDIMScheduler,
)
add("cogview4", "CogView4Pipeline", prompted(**VIEW), "image dit glm", cogview_pipeline)
add(
    "cogview4_control",
    "CogView4ControlPipeline",
    prompted(**VIEW, control_image=lambda: image_tensor(16)),
    "image dit glm",
    cogview_pipeline,
    transformer=lambda: tiny_cogview4(8),
)
