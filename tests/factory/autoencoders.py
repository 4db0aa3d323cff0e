"""Builders of tiny autoencoders (real diffusers classes, random weights)."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import ModelMixin


def tiny_vae_kl(latent_channels: int = 4, channels: tuple[int, ...] = (8, 16), **options: Any) -> ModelMixin:
    """AutoencoderKL; scale factor 2 ** (len(channels) - 1)."""
    defaults: dict[str, Any] = {
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "block_out_channels": list(channels),
        "layers_per_block": 1,
        "latent_channels": latent_channels,
        "norm_num_groups": 4,
        "sample_size": 32,
    }
    return diffusers.AutoencoderKL(**(defaults | options))


def tiny_vae_flow(latent_channels: int = 4, channels: tuple[int, ...] = (8,), **options: Any) -> ModelMixin:
    """AutoencoderKL as the flow-matching pipelines have it: no quantisation convolutions, a shift factor."""
    defaults = {
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.0609,
        "scaling_factor": 1.5035,
    }
    return tiny_vae_kl(latent_channels, channels, **(defaults | options))


def tiny_vae_wan(**options: Any) -> ModelMixin:
    """AutoencoderKLWan: 16 latent channels, 8x in space, 4x in time."""
    defaults = {
        "base_dim": 4,
        "z_dim": 16,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
    }
    return diffusers.AutoencoderKLWan(**(defaults | options))


def tiny_vae_ltx(**options: Any) -> ModelMixin:
    """AutoencoderKLLTXVideo with four levels."""
    defaults = {
        "latent_channels": 8,
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False),
        "decoder_inject_noise": (False, False, False, False, False),
        "upsample_residual": (False, False, False, False),
        "upsample_factor": (1, 1, 1, 1),
        "patch_size": 1,
        "patch_size_t": 1,
    }
    vae = diffusers.AutoencoderKLLTXVideo(**(defaults | options))
    return vae


def tiny_vae_qwen(z_dim: int = 4, **options: Any) -> ModelMixin:
    """AutoencoderKLQwenImage with three levels (4x in space)."""
    defaults = {
        "base_dim": 8,
        "z_dim": z_dim,
        "dim_mult": [1, 2, 4],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
        "latents_mean": [0.0] * z_dim,
        "latents_std": [1.0] * z_dim,
    }
    return diffusers.AutoencoderKLQwenImage(**(defaults | options))


def tiny_vae_hunyuan(**options: Any) -> ModelMixin:
    """AutoencoderKLHunyuanVideo with four levels."""
    defaults = {
        "latent_channels": 4,
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
    return diffusers.AutoencoderKLHunyuanVideo(**(defaults | options))


def tiny_vae_cogvideo(**options: Any) -> ModelMixin:
    """AutoencoderKLCogVideoX with four levels."""
    defaults = {
        "down_block_types": ("CogVideoXDownBlock3D",) * 4,
        "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        "block_out_channels": (8, 8, 8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "temporal_compression_ratio": 4,
    }
    return diffusers.AutoencoderKLCogVideoX(**(defaults | options))
