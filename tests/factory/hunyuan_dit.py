"""HunyuanDiT."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import add, fill, pipeline
from factory.inputs import NEGATIVE, image_tensor, prompted
from factory.text import LAYERS, WIDTH, tiny_t5
from factory.tokenizers import VOCAB_SIZE, build_bert_tokenizer, build_t5_tokenizer


def tiny_bert() -> transformers.PreTrainedModel:
    """BertModel."""
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return transformers.BertModel(config)


def hunyuan_dit_options() -> dict[str, Any]:
    """The configuration that HunyuanDiT shares with its ControlNet."""
    return {
        "sample_size": 16,
        "num_layers": 4,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "in_channels": 4,
        "cross_attention_dim": WIDTH,
        "cross_attention_dim_t5": WIDTH,
        "pooled_projection_dim": 16,
        "hidden_size": 24,
        "text_len": 77,
        "text_len_t5": 256,
        "activation_fn": "gelu-approximate",
    }


def hunyuan_dit_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of HunyuanDiT components."""
    defaults = {
        "transformer": lambda: diffusers.HunyuanDiT2DModel(**hunyuan_dit_options()),
        "vae": tiny_vae_kl,
        "text_encoder": tiny_bert,
        "text_encoder_2": tiny_t5,
        "tokenizer": build_bert_tokenizer,
        "tokenizer_2": lambda: build_t5_tokenizer(256),
        "scheduler": diffusers.DDPMScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


DIT_TAGS = "image dit bert t5"
DIT_SIZE = {"height": 16, "width": 16, "use_resolution_binning": False, "negative_prompt": NEGATIVE}

add("hunyuan_dit", "HunyuanDiTPipeline", prompted(**DIT_SIZE), DIT_TAGS, hunyuan_dit_pipeline)
add(
    "hunyuan_dit_controlnet",
    "HunyuanDiTControlNetPipeline",
    prompted(**DIT_SIZE, control_image=lambda: image_tensor(16)),
    DIT_TAGS + " controlnet",
    hunyuan_dit_pipeline,
    controlnet=lambda: diffusers.HunyuanDiT2DControlNetModel(
        **{name: value for name, value in hunyuan_dit_options().items() if name != "num_layers"},
        transformer_num_layers=4,
    ),
)
