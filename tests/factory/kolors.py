"""Kolors."""

from __future__ import annotations

import functools
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import NOISE, add, fill, pipeline
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, prompted
from factory.stable_diffusion import SIZE
from factory.stable_diffusion_xl import sdxl_scheduler
from factory.text import LAYERS, WIDTH
from factory.tokenizers import VOCAB_SIZE, WORDS
from factory.unets import tiny_unet_sdxl

TAGS = "image unet chatglm"


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Holds the vocabulary file, which the tokenizer wants to have on disk, until the process ends."""
    return tempfile.TemporaryDirectory(prefix="factory-")


def build_chatglm_tokenizer() -> Any:
    """ChatGLMTokenizer over a sentencepiece model trained on the words."""
    import sentencepiece
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    path = Path(_folder().name, "tokenizer.model")
    if not path.exists():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(WORDS * 4), model_writer=model, vocab_size=120, hard_vocab_limit=False, minloglevel=2
        )
        path.write_bytes(model.getvalue())
    return ChatGLMTokenizer(str(path))


def tiny_chatglm() -> Any:
    """ChatGLMModel."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    config = ChatGLMConfig(
        num_layers=LAYERS,
        padded_vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        ffn_hidden_size=40,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=256,
        add_qkv_bias=True,
        multi_query_attention=True,
        multi_query_group_num=2,
        original_rope=True,
    )
    model = ChatGLMModel(config)
    for parameter in model.parameters():  # the class leaves its memory as it finds it
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, NOISE)
    return model


def kolors_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Kolors components."""
    defaults = {
        "unet": lambda: tiny_unet_sdxl(
            cross_attention_dim=WIDTH, encoder_hid_dim=None, projection_class_embeddings_input_dim=6 * 8 + WIDTH
        ),
        "vae": tiny_vae_kl,
        "text_encoder": tiny_chatglm,
        "tokenizer": build_chatglm_tokenizer,
        "scheduler": sdxl_scheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


KOLORS = {**SIZE, "negative_prompt": NEGATIVE, "max_sequence_length": 32}

add("kolors", "KolorsPipeline", prompted(**KOLORS), TAGS, kolors_pipeline)
add("kolors_img2img", "KolorsImg2ImgPipeline", prompted(**KOLORS, **IMG2IMG, image=image_tensor), TAGS, kolors_pipeline)
