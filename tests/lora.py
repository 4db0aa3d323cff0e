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
