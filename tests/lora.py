"""LoRA checkpoints, textual inversions and IP-Adapters with random values, for tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

peft = pytest.importorskip("peft", reason="LoRA needs peft")

StateDict = dict[str, torch.Tensor]

#: What each component's adapters go on: attention, feed-forward, convolutions, a projection in.
TARGETS = {
    "unet": ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1"],
    "transformer": ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "proj_mlp", "norm.linear", "ffn.net.2"],
    "text_encoder": ["q_proj", "v_proj", "out_proj", "fc1"],
}


def targets(name: str) -> list[str]:
    """The modules of a component that get adapters."""
    return next(found for key, found in TARGETS.items() if name.startswith(key))


def factors(pipe: DiffusionPipeline, names: Sequence[str], seed: int, rank: int = 4, dora: bool = False) -> StateDict:
    """A LoRA for some components of a pipeline, as a checkpoint has it; it clearly shows in an image."""
    found: StateDict = {}
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets(name), use_dora=dora)
        with torch.random.fork_rng(devices=[]):
            wrapped = peft.inject_adapter_in_model(config, copy.deepcopy(getattr(pipe, name)))
        for key, value in peft.get_peft_model_state_dict(wrapped).items():
            random = torch.randn(value.shape, generator=generator) * 0.15 + (1.0 if "magnitude" in key else 0.0)
            found[f"{name}.{key}"] = random.to(value.dtype)
    return found


def copied(checkpoint: StateDict) -> StateDict:
    """The same again: loaders take a checkpoint apart."""
    return {key: value.clone() for key, value in checkpoint.items()}


def tuners(module: nn.Module) -> list[nn.Module]:
    """The layers of a component that adapters wrap."""
    return [part for part in module.modules() if "base_layer" in part._modules]


def _image_projection(width: int, embed_dim: int, generator: torch.Generator, tokens: int = 4) -> StateDict:
    return {
        "proj.weight": torch.randn(tokens * width, embed_dim, generator=generator) * 0.1,
        "proj.bias": torch.randn(tokens * width, generator=generator) * 0.1,
        "norm.weight": 1 + torch.randn(width, generator=generator) * 0.1,
        "norm.bias": torch.randn(width, generator=generator) * 0.1,
    }


def ip_adapter(denoiser: nn.Module, embed_dim: int, seed: int = 3) -> dict[str, StateDict]:
    """An IP-Adapter's checkpoint for a UNet or a Flux transformer."""
    generator = torch.Generator().manual_seed(seed)
    config = denoiser.config
    is_unet = hasattr(config, "cross_attention_dim")
    width = config.cross_attention_dim if is_unet else config.joint_attention_dim
    adapter: StateDict = {}
    key = 1 if is_unet else 0
    for name in denoiser.attn_processors:
        if name.endswith("attn1.processor") or name.startswith("single_"):
            continue
        hidden = denoiser.get_submodule(name.removesuffix(".processor")).to_k.out_features
        for part in ("to_k_ip", "to_v_ip"):
            adapter[f"{key}.{part}.weight"] = torch.randn(hidden, width, generator=generator) * 0.3
            if not is_unet:
                adapter[f"{key}.{part}.bias"] = torch.randn(hidden, generator=generator) * 0.1
        key += 2 if is_unet else 1
    return {"image_proj": _image_projection(width, embed_dim, generator), "ip_adapter": adapter}
