"""Public models at full size, by their published configs: built on the meta device, for tests of planning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class PublicModel:
    """A model: `build()` makes it (call it on meta), `parameters` is the published count."""

    build: Callable[[], nn.Module]
    parameters: int


def _t5(kind: str, vocabulary: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(
            d_model=4096,
            d_kv=64,
            d_ff=10240,
            num_layers=24,
            num_heads=64,
            vocab_size=vocabulary,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
            tie_word_embeddings=False,
        )
        return getattr(transformers, f"{kind}EncoderModel")(config)

    return build


def _clip(kind: str, **options: Any) -> Callable[[], nn.Module]:
    config = {"vocab_size": 49408, "max_position_embeddings": 77} | options
    return lambda: getattr(transformers, kind)(transformers.CLIPTextConfig(**config))


def _vae(latents: int, quant: bool) -> Callable[[], nn.Module]:
    return lambda: diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=latents,
        sample_size=1024,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
    )


def sdxl() -> nn.Module:
    """The UNet of stabilityai/stable-diffusion-xl-base-1.0."""
    return diffusers.UNet2DConditionModel(
        sample_size=128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        layers_per_block=2,
        cross_attention_dim=2048,
        transformer_layers_per_block=[1, 2, 10],
        attention_head_dim=[5, 10, 20],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def sd35() -> nn.Module:
    """The transformer of stabilityai/stable-diffusion-3.5-large."""
    return diffusers.SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        num_layers=38,
        attention_head_dim=64,
        num_attention_heads=38,
        joint_attention_dim=4096,
        caption_projection_dim=2432,
        pooled_projection_dim=2048,
        out_channels=16,
        pos_embed_max_size=192,
        qk_norm="rms_norm",
    )


def ltx() -> nn.Module:
    """The transformer of Lightricks/LTX-Video-0.9.7-dev (13B)."""
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=128,
        out_channels=128,
        num_attention_heads=32,
        attention_head_dim=128,
        cross_attention_dim=4096,
        num_layers=48,
        caption_channels=4096,
        qk_norm="rms_norm_across_heads",
    )


MODELS = {
    "FLUX.1-dev": PublicModel(lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True), 11_901_408_320),
    "SDXL UNet": PublicModel(sdxl, 2_567_463_684),
    "SD3.5-large": PublicModel(sd35, 8_056_627_520),
    "Wan2.1-14B": PublicModel(diffusers.WanTransformer3DModel, 14_288_491_584),
    "Qwen-Image": PublicModel(diffusers.QwenImageTransformer2DModel, 20_430_401_088),
    "HunyuanVideo": PublicModel(diffusers.HunyuanVideoTransformer3DModel, 12_821_012_544),
    "LTX 0.9.7 13B": PublicModel(ltx, 13_042_569_344),
    "T5-XXL encoder": PublicModel(_t5("T5", 32128), 4_762_310_656),
    "UMT5-XXL": PublicModel(_t5("UMT5", 256384), 5_680_910_336),
    "CLIP-L": PublicModel(
        _clip(
            "CLIPTextModel",
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            projection_dim=768,
        ),
        123_060_480,
    ),
    "CLIP-bigG": PublicModel(
        _clip(
            "CLIPTextModelWithProjection",
            hidden_size=1280,
            intermediate_size=5120,
            num_hidden_layers=32,
            num_attention_heads=20,
            projection_dim=1280,
            hidden_act="gelu",
        ),
        694_659_840,
    ),
    "SDXL VAE": PublicModel(_vae(4, True), 83_653_863),
    "FLUX VAE": PublicModel(_vae(16, False), 83_819_683),
    "Wan VAE": PublicModel(diffusers.AutoencoderKLWan, 126_892_531),
}


def on_meta(name: str, dtype: torch.dtype = BF16) -> nn.Module:
    """A model without weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return MODELS[name].build().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def inputs_of(name: str) -> dict[str, Any]:
    """The inputs of diffusers' published benchmark (batch 1; 1024x1024, or LTX's 7392 video tokens)."""
    if name == "FLUX.1-dev":
        return {
            "hidden_states": _empty(1, 4096, 64),
            "encoder_hidden_states": _empty(1, 512, 4096),
            "pooled_projections": _empty(1, 768),
            "timestep": _empty(1),
            "img_ids": _empty(4096, 3),
            "txt_ids": _empty(512, 3),
            "guidance": _empty(1, dtype=torch.float32),
            "return_dict": False,
        }
    if name == "LTX 0.9.7 13B":
        return {
            "hidden_states": _empty(1, 7392, 128),
            "encoder_hidden_states": _empty(1, 256, 4096),
            "encoder_attention_mask": _empty(1, 256),
            "timestep": _empty(1),
            "video_coords": _empty(1, 3, 7392),
            "return_dict": False,
        }
    added = {"text_embeds": _empty(1, 1280), "time_ids": _empty(1, 6)}
    return {
        "sample": _empty(1, 4, 128, 128),
        "timestep": _empty(1),
        "encoder_hidden_states": _empty(1, 77, 2048),
        "added_cond_kwargs": added,
        "return_dict": False,
    }
