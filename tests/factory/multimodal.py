"""Builders of tiny vision-language models and their processors (real transformers classes, random weights)."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedModel

from factory.text import WIDTH, decoder_options
from factory.tokenizers import QWEN_SPECIALS, build_llama_tokenizer, build_qwen2_tokenizer


def qwen_token_ids() -> dict[str, int]:
    """The ids of the vision tokens, as the Qwen configurations name them."""
    special = {token: index for index, token in enumerate(QWEN_SPECIALS)}
    return {
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "vision_token_id": special["<|vision_pad|>"],
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
    }


def tiny_qwen2_5_vl(**options: Any) -> PreTrainedModel:
    """Qwen2_5_VLForConditionalGeneration with a vision tower of four layers."""
    text = decoder_options({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}} | options)
    vision = {
        "depth": 4,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1, 3],
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **qwen_token_ids())
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def tiny_qwen2_5_vl_text(**options: Any) -> PreTrainedModel:
    """Qwen2_5_VLTextModel."""
    options = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}} | options
    config = transformers.models.qwen2_5_vl.Qwen2_5_VLTextConfig(**decoder_options(options))
    return transformers.Qwen2_5_VLTextModel(config)


def tiny_qwen2_vl(**options: Any) -> PreTrainedModel:
    """Qwen2VLForConditionalGeneration with a vision tower of four layers."""
    text = decoder_options({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}} | options)
    vision = {"depth": 4, "embed_dim": WIDTH, "hidden_size": text["hidden_size"], "num_heads": 2, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **qwen_token_ids())
    return transformers.Qwen2VLForConditionalGeneration(config)


def tiny_qwen3_vl(base: bool = False, **options: Any) -> PreTrainedModel:
    """Qwen3VLForConditionalGeneration, or the Qwen3VLModel under it, with a vision tower of four layers."""
    text = decoder_options({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}} | options)
    vision = {
        "depth": 4,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [1, 2],
        "num_position_embeddings": 64,
    }
    ids = {name: value for name, value in qwen_token_ids().items() if name != "vision_token_id"}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    return transformers.Qwen3VLModel(config) if base else transformers.Qwen3VLForConditionalGeneration(config)


class VisionLanguageProcessor:
    """Stands in for Qwen2VLProcessor, which cannot be made without torchvision; its two parts are the real ones."""

    def __init__(self) -> None:
        self.tokenizer = build_qwen2_tokenizer(max_length=2048)
        sizes = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
        self.image_processor = transformers.Qwen2VLImageProcessor(size=sizes)
        self.image_token = "<|image_pad|>"
        self.image_token_id = self.tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, text: Any = None, images: Any = None, **options: Any) -> transformers.BatchFeature:
        """Token ids with one image token for each merged patch, and the patches."""
        text = [text] if isinstance(text, str) else list(text)
        features: dict[str, Any] = {}
        if images is not None:
            features = dict(self.image_processor(images=images, return_tensors="pt"))
            counts = features["image_grid_thw"].prod(dim=1) // self.image_processor.merge_size**2
            text = self._expand(text, counts.tolist())
        return transformers.BatchFeature({**self.tokenizer(text, **options), **features})

    def _expand(self, text: list[str], counts: list[int]) -> list[str]:
        expanded = []
        remaining = iter(counts)
        for line in text:
            first, *rest = line.split(self.image_token)
            expanded.append(first + "".join(self.image_token * next(remaining) + part for part in rest))
        return expanded

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        """The tokenizer's."""
        return self.tokenizer.apply_chat_template(*args, **options)

    def decode(self, *args: Any, **options: Any) -> Any:
        """The tokenizer's."""
        return self.tokenizer.decode(*args, **options)

    def batch_decode(self, *args: Any, **options: Any) -> Any:
        """The tokenizer's."""
        return self.tokenizer.batch_decode(*args, **options)


PIXTRAL_SPECIALS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
"""Image tokens of the Mistral 3 models, given to their tokenizer as extra special tokens."""


def tiny_mistral3(**options: Any) -> PreTrainedModel:
    """Mistral3ForConditionalGeneration with a vision tower of four layers."""
    text = decoder_options({"model_type": "mistral", "sliding_window": None} | options)
    vision = {
        "model_type": "pixtral",
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    image_token = build_llama_tokenizer(extra=PIXTRAL_SPECIALS).convert_tokens_to_ids("[IMG]")
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=image_token, vision_feature_layer=-1
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def tiny_gemma3(**options: Any) -> PreTrainedModel:
    """Gemma3ForConditionalGeneration with a vision tower of four layers."""
    text = decoder_options({"sliding_window": 16, "query_pre_attn_scalar": 8} | options)
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)
