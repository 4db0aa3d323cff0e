"""LTX-2: video and sound together."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.core import add, fields_output, fill, pipeline, register
from factory.inputs import NEGATIVE, image_tensor, prompted
from factory.multimodal import tiny_gemma3
from factory.text import LAYERS, WIDTH
from factory.tokenizers import build_gemma_tokenizer

TAGS = "video audio dit gemma3"
BOTH = fields_output("frames", "audio")
SIZE = {
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "frame_rate": 25.0,
    "max_sequence_length": 16,
    "negative_prompt": NEGATIVE,
    "guidance_scale": 2.0,
}
FREE = {**SIZE, "stg_scale": 0.0, "audio_stg_scale": 0.0, "spatio_temporal_guidance_blocks": None}


def tiny_ltx2() -> diffusers.ModelMixin:
    """LTX2VideoTransformer3DModel of four blocks."""
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=4,
        caption_channels=WIDTH,
        rope_double_precision=False,
        rope_type="split",
    )


def tiny_connectors() -> diffusers.ModelMixin:
    """LTX2TextConnectors over all layers of the text encoder."""
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    return LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=LAYERS + 1,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=2,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=2,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
        rope_type="split",
    )


def tiny_vae_ltx2() -> diffusers.ModelMixin:
    """AutoencoderKLLTX2Video with one level."""
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
        patch_size_t=1,
    )


def tiny_vae_audio() -> diffusers.ModelMixin:
    """AutoencoderKLLTX2Audio."""
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        mel_bins=8,
    )


def tiny_vocoder() -> diffusers.ModelMixin:
    """LTX2Vocoder."""
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    return LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )


def ltx2_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of LTX-2 components."""
    defaults = {
        "transformer": tiny_ltx2,
        "vae": tiny_vae_ltx2,
        "audio_vae": tiny_vae_audio,
        "vocoder": tiny_vocoder,
        "connectors": tiny_connectors,
        "text_encoder": tiny_gemma3,
        "tokenizer": build_gemma_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


def _condition() -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

    return LTX2VideoCondition(frames=image_tensor(), index=0, strength=1.0, crf=0)


def _hdr_reference() -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition

    return LTX2HDRReferenceCondition(frames=image_tensor(), strength=1.0)


add("ltx2", "LTX2Pipeline", prompted(**FREE), TAGS, ltx2_pipeline, BOTH)
add(
    "ltx2_image",
    "LTX2ImageToVideoPipeline",
    prompted(**FREE, image=image_tensor, image_crf=0),
    TAGS,
    ltx2_pipeline,
    BOTH,
)
add("ltx2_condition", "LTX2ConditionPipeline", prompted(**FREE, conditions=_condition), TAGS, ltx2_pipeline, BOTH)
add("ltx2_in_context", "LTX2InContextPipeline", prompted(**SIZE, conditions=_condition), TAGS, ltx2_pipeline, BOTH)
add(
    "ltx2_hdr",
    "LTX2HDRPipeline",
    prompted(**SIZE, reference_conditions=_hdr_reference),
    f"{TAGS} idle:audio_vae idle:vocoder",
    ltx2_pipeline,
)


@register(
    "ltx2_upsample",
    "LTX2LatentUpsamplePipeline",
    lambda: {
        "video": image_tensor(32).repeat(5, 1, 1, 1),
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "output_type": "pt",
    },
    "video upsampler",
)
def ltx2_upsample() -> DiffusionPipeline:
    """Video to a video twice as large, through the latents."""
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    upsampler = LTX2LatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=2)
    return pipeline("LTX2LatentUpsamplePipeline", vae=tiny_vae_ltx2(), latent_upsampler=upsampler)
