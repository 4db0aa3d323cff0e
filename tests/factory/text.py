"""Builders of tiny text encoders (real transformers classes, random weights)."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from factory.tokenizers import VOCAB_SIZE, build_clip_tokenizer

LAYERS = 8
"""Depth of every text encoder."""

WIDTH = 32
"""Hidden size of every text encoder."""


def _clip_config(**options: Any) -> transformers.CLIPTextConfig:
    tokenizer = build_clip_tokenizer()
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "projection_dim": WIDTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return transformers.CLIPTextConfig(**(defaults | options))


def tiny_clip_text(**options: Any) -> PreTrainedModel:
    """CLIPTextModel."""
    return transformers.CLIPTextModel(_clip_config(**options))


def tiny_clip_text_projection(**options: Any) -> PreTrainedModel:
    """CLIPTextModelWithProjection."""
    return transformers.CLIPTextModelWithProjection(_clip_config(**options))


def _t5_options(options: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 40,
        "num_layers": LAYERS,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,
    }
    return defaults | options


def tiny_t5(**options: Any) -> PreTrainedModel:
    """T5EncoderModel (gated, tied embeddings)."""
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_options(options)))


def tiny_umt5(**options: Any) -> PreTrainedModel:
    """UMT5EncoderModel (a relative position table in each layer)."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_options(options)))


def decoder_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options shared by the decoder-only language models."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return defaults | options


def tiny_llama(**options: Any) -> PreTrainedModel:
    """LlamaModel."""
    return transformers.LlamaModel(transformers.LlamaConfig(**decoder_options(options)))


def tiny_gemma(**options: Any) -> PreTrainedModel:
    """GemmaModel."""
    return transformers.GemmaModel(transformers.GemmaConfig(**decoder_options(options)))


def tiny_gemma2(**options: Any) -> PreTrainedModel:
    """Gemma2Model."""
    return transformers.Gemma2Model(transformers.Gemma2Config(**decoder_options({"sliding_window": 16} | options)))


def tiny_qwen3(**options: Any) -> PreTrainedModel:
    """Qwen3ForCausalLM."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**decoder_options(options)))


def tiny_qwen3_model(**options: Any) -> PreTrainedModel:
    """Qwen3Model."""
    return transformers.Qwen3Model(transformers.Qwen3Config(**decoder_options(options)))


def tiny_llama_lm(**options: Any) -> PreTrainedModel:
    """LlamaForCausalLM."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder_options(options)))
