"""Real model structures at full depth with scaled-down widths, and the cards they are timed on.

How the scaling works. Widths (hidden sizes, head dims, text dims) and token counts both shrink by one factor `r`:

* bytes of a weight matrix, and bytes of an activation, shrink by r**2 (width x width, tokens x width);
* FLOPs of a linear layer (tokens x width**2), of attention (tokens**2 x width) and of a convolution shrink by r**3.

So when the simulated card's FLOP rate is the real one times r**3 and its memory bandwidth the real one times r**2,
every kernel takes, on the virtual clock, the seconds that it takes on the real card, and the share of each layer in the
step (uneven layers are what makes scheduling hard) is the real model's. Since virtual seconds are then real seconds,
the fixed costs need no scaling: 5 us of host time per launch (kernels of these models take 0.1-5 ms, so the host runs
ahead as it does on a real card), 3 us for the smallest kernel, 8 us per copy. The link's bandwidth follows from the
ratio transfer/compute of the real model on the real card, so that this ratio is exact. Weights are float32 because CPU
kernels are fast there; a real bfloat16 weight is half as long, which the bandwidths account for (`WIDTH`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WIDTH = 2.0  # bytes of a float32 / bytes of a bfloat16
LAUNCH_S, KERNEL_MIN_S, COPY_LATENCY_S, QUERY_S = 5e-6, 3e-6, 8e-6, 1e-6

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """What a model can get out of a card: matmul FLOP/s and memory bytes/s, both about 75-80 % of the peak."""

    name: str
    flops: float
    bandwidth: float
    pageable: float  # bandwidth of copies from pageable host memory / from pinned host memory


RTX4090 = Card("RTX 4090", 165e12 * 0.75, 1.0e12 * 0.8, 8 / 22)
RTX5090 = Card("RTX 5090", 209e12 * 0.8, 1.79e12 * 0.8, 11 / 45)


@dataclass(frozen=True)
class ModelCase:
    """A model to schedule: how to build it, what to feed it, and the real card whose proportions it must have."""

    name: str
    title: str
    card: Card
    ratio: float  # seconds to copy all weights / seconds to compute one pass, on the real card
    scale: float  # r above
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.device], Inputs]
    target: float  # step / bound promised at every budget
    block_root: str = ""  # the submodule whose ModuleLists diffusers' block-level offload can see ("" = the model)
    one_pass: bool = False  # an encoder: one pass per use, nothing runs before or after it

    def clock(self) -> dict[str, float]:
        """Constants of the simulated card; the link is set later, from the measured compute time."""
        return {
            "flops": self.card.flops * self.scale**3,
            "hbm": self.card.bandwidth * self.scale**2 * WIDTH,
            "launch": LAUNCH_S,
            "kernel_min": KERNEL_MIN_S,
            "copy_lat": COPY_LATENCY_S,
            "query": QUERY_S,
        }

    def link(self, bytes_per_second: float) -> dict[str, float]:
        """Constants of a link with this bandwidth for pinned memory."""
        pageable = bytes_per_second * self.card.pageable
        return {"h2d": bytes_per_second, "d2h": bytes_per_second, "pageable": pageable}


def flux() -> nn.Module:
    """FLUX.1-dev's transformer, 19 double and 38 single blocks, width 3072 / 32."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4, num_attention_heads=4, attention_head_dim=24, joint_attention_dim=128, pooled_projection_dim=24,
        guidance_embeds=True, axes_dims_rope=(4, 10, 10),
    )  # fmt: skip


def flux_inputs(device: torch.device) -> Inputs:
    """1024 x 1024: 4096 image and 512 text tokens, / 32."""
    return {
        "hidden_states": torch.randn(1, 128, 4, device=device),
        "encoder_hidden_states": torch.randn(1, 16, 128, device=device),
        "pooled_projections": torch.randn(1, 24, device=device),
        "timestep": torch.full((1,), 0.5, device=device),
        "img_ids": torch.zeros(128, 3, device=device),
        "txt_ids": torch.zeros(16, 3, device=device),
        "guidance": torch.full((1,), 3.5, device=device),
        "return_dict": False,
    }


def qwen() -> nn.Module:
    """Qwen-Image's transformer, 60 double blocks, width 3072 / 32."""
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=4, out_channels=1, num_attention_heads=4, attention_head_dim=24, joint_attention_dim=112,
        axes_dims_rope=(4, 10, 10),
    )  # fmt: skip


def qwen_inputs(device: torch.device) -> Inputs:
    """1024 x 1024: 4096 image and 128 text tokens, / 32."""
    return {
        "hidden_states": torch.randn(1, 128, 4, device=device),
        "encoder_hidden_states": torch.randn(1, 4, 112, device=device),
        "timestep": torch.full((1,), 0.5, device=device),
        "img_shapes": [[(1, 8, 16)]],
        "return_dict": False,
    }


def wan() -> nn.Module:
    """Wan2.1-14B's transformer, 40 blocks, width 5120 / 64."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=5, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=64, ffn_dim=216
    )  # fmt: skip


def wan_inputs(device: torch.device) -> Inputs:
    """480 x 832, 81 frames: 32760 tokens, / 64."""
    return {
        "hidden_states": torch.randn(1, 4, 2, 32, 32, device=device),
        "timestep": torch.full((1,), 500, dtype=torch.int64, device=device),
        "encoder_hidden_states": torch.randn(1, 8, 64, device=device),
        "return_dict": False,
    }


def sdxl() -> nn.Module:
    """SDXL's UNet, channels (320, 640, 1280) / 16."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(20, 40, 80), layers_per_block=2, cross_attention_dim=128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 2, 10], attention_head_dim=[1, 2, 4], use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=16, projection_class_embeddings_input_dim=176,
        norm_num_groups=4,
    )  # fmt: skip


def sdxl_inputs(device: torch.device) -> Inputs:
    """1024 x 1024 with guidance (a batch of two): 128 x 128 latents and 77 text tokens, / 16."""
    condition = {"text_embeds": torch.randn(2, 80, device=device), "time_ids": torch.ones(2, 6, device=device)}
    return {
        "sample": torch.randn(2, 4, 32, 32, device=device),
        "timestep": torch.full((1,), 500.0, device=device),
        "encoder_hidden_states": torch.randn(2, 5, 128, device=device),
        "added_cond_kwargs": condition,
        "return_dict": False,
    }


def t5() -> nn.Module:
    """T5-XXL's encoder, 24 blocks, width 4096 / 32."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=1004, d_model=128, d_kv=32, d_ff=320, num_layers=24, num_heads=4, feed_forward_proj="gated-gelu",
        is_encoder_decoder=False, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return T5EncoderModel(config)


def t5_inputs(device: torch.device) -> Inputs:
    """512 tokens, / 32."""
    return {"input_ids": torch.arange(16, device=device).reshape(1, 16) * 7 % 1000, "return_dict": False}


CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("flux", "FLUX.1-dev, RTX 4090", RTX4090, 1.36, 1 / 32, flux, flux_inputs, 1.07),
        ModelCase("qwen", "Qwen-Image, RTX 5090", RTX5090, 1.77, 1 / 32, qwen, qwen_inputs, 1.03),
        ModelCase("wan", "Wan2.1-14B 480p, RTX 4090", RTX4090, 0.08, 1 / 64, wan, wan_inputs, 1.01),
        ModelCase("sdxl", "SDXL UNet, RTX 4090", RTX4090, 1.72, 1 / 16, sdxl, sdxl_inputs, 1.18),
        ModelCase("t5", "T5-XXL encoder, one pass, RTX 4090", RTX4090, 7.6, 1 / 32, t5, t5_inputs, 1.05,
                  block_root="encoder", one_pass=True),
    )
}  # fmt: skip


def build(case: ModelCase) -> nn.Module:
    """The scaled model with seeded random weights, in evaluation mode, without gradients."""
    torch.manual_seed(0)
    return case.build().eval().requires_grad_(False)


def make_inputs(case: ModelCase, device: torch.device) -> Inputs:
    """Seeded inputs: the same values whatever the device."""
    torch.manual_seed(1)
    return {key: _to(value, device) for key, value in case.inputs(torch.device("cpu")).items()}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return {key: _to(item, device) for key, item in value.items()} if isinstance(value, dict) else value


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size()
                for t in [*module.parameters(), *module.buffers()]}  # fmt: skip
    return sum(storages.values())
