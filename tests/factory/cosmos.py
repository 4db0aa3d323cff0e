"""Cosmos."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin

from factory.autoencoders import tiny_vae_wan
from factory.core import KNOWN_BROKEN, add, fill, pipeline
from factory.inputs import NEGATIVE, pil_image, prompted
from factory.multimodal import tiny_qwen2_5_vl
from factory.text import WIDTH, tiny_t5
from factory.tokenizers import build_qwen2_tokenizer, build_t5_tokenizer

TAGS = "video dit t5 idle:safety_checker"
SIZE = {"height": 32, "width": 32, "max_sequence_length": 16, "negative_prompt": NEGATIVE, "guidance_scale": 3.0}
VIDEO = {**SIZE, "num_frames": 9}


class Guardrail(ModelMixin, ConfigMixin):
    """Stands in for the safety checker, whose models are a package of their own: looks, and finds everything safe."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(1, 1)

    def check_text_safety(self, prompt: str) -> bool:
        """Every prompt is safe."""
        return bool(torch.isfinite(self.score(self.score.weight.new_full((1, 1), len(prompt)))))

    def check_video_safety(self, frames: Any) -> Any:
        """Every video is safe as it is."""
        self.score(self.score.weight.new_full((1, 1), float(frames.mean())))
        return frames


def tiny_cosmos(**options: Any) -> ModelMixin:
    """CosmosTransformer3DModel of four blocks."""
    defaults = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 4,
        "mlp_ratio": 2,
        "text_embed_dim": WIDTH,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "patch_size": (1, 2, 2),
        "rope_scale": (2.0, 1.0, 1.0),
        "extra_pos_embed_type": "learnable",
        "concat_padding_mask": False,  # needs torchvision
    }
    return diffusers.CosmosTransformer3DModel(**(defaults | options))


def tiny_vae_cosmos() -> ModelMixin:
    """AutoencoderKLCosmos."""
    return diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=2,
        patch_size=4,
        scaling_factor=1.0,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def edm_scheduler() -> diffusers.SchedulerMixin:
    """The schedule of the first Cosmos models."""
    return diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, prediction_type="epsilon", final_sigmas_type="sigma_min"
    )


def cosmos_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Cosmos components."""
    defaults = {
        "transformer": tiny_cosmos,
        "vae": tiny_vae_cosmos,
        "text_encoder": tiny_t5,
        "tokenizer": build_t5_tokenizer,
        "scheduler": edm_scheduler,
        "safety_checker": Guardrail,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


def cosmos2_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Cosmos 2 components."""
    defaults = {
        "transformer": lambda: tiny_cosmos(in_channels=17, out_channels=16),
        "vae": tiny_vae_wan,
        "scheduler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
    }
    return cosmos_pipeline(pipeline_class, **fill(defaults, components))


def cosmos25_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Cosmos 2.5 components."""
    defaults = {
        "transformer": lambda: tiny_cosmos(
            in_channels=17,
            out_channels=16,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=8 * WIDTH,
            encoder_hidden_states_channels=WIDTH,
        ),
        "text_encoder": tiny_qwen2_5_vl,
        "tokenizer": build_qwen2_tokenizer,
        "scheduler": diffusers.UniPCMultistepScheduler,
    }
    return cosmos2_pipeline(pipeline_class, **fill(defaults, components))


add("cosmos", "CosmosTextToWorldPipeline", prompted(**VIDEO), TAGS, cosmos_pipeline)
add(
    "cosmos_video",
    "CosmosVideoToWorldPipeline",
    prompted(**VIDEO, image=pil_image),
    TAGS,
    cosmos_pipeline,
    transformer=lambda: tiny_cosmos(in_channels=5),
)
add(
    "cosmos2_text",
    "Cosmos2TextToImagePipeline",
    prompted(**SIZE),
    TAGS.replace("video", "image"),
    cosmos2_pipeline,
    transformer=lambda: tiny_cosmos(in_channels=16, out_channels=16),
)
add("cosmos2_video", "Cosmos2VideoToWorldPipeline", prompted(**VIDEO, image=pil_image), TAGS, cosmos2_pipeline)
add(
    "cosmos25_predict",
    "Cosmos2_5_PredictBasePipeline",
    prompted(**{**SIZE, "num_frames": 5, "max_sequence_length": 64}),
    "video dit qwen2_5_vl idle:safety_checker",
    cosmos25_pipeline,
)


KNOWN_BROKEN["Cosmos2_5_TransferPipeline"] = "its ControlNet needs torchvision"
