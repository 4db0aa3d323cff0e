"""Kandinsky 2.1, 2.2 and 3."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from factory.core import add, fields_output, fill, pipeline
from factory.inputs import IMG2IMG, NEGATIVE, call, image_tensor, pil_image, prompted
from factory.text import LAYERS, WIDTH, tiny_clip_text_projection, tiny_t5
from factory.tokenizers import VOCAB_SIZE, build_clip_tokenizer, build_t5_tokenizer, build_xlm_roberta_tokenizer
from factory.unets import tiny_prior
from factory.vision import tiny_clip_image_processor, tiny_clip_vision

EMBEDS = fields_output("image_embeds", "negative_image_embeds")
PRIOR_TAGS = "prior clip clip_vision"


def prior_scheduler() -> diffusers.SchedulerMixin:
    """The schedule of the priors."""
    return diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", num_train_timesteps=1000, clip_sample_range=10.0
    )


def prior_components() -> dict[str, Any]:
    """Components of a prior pipeline."""
    return {
        "prior": tiny_prior(),
        "image_encoder": tiny_clip_vision(),
        "text_encoder": tiny_clip_text_projection(),
        "tokenizer": build_clip_tokenizer(),
        "scheduler": prior_scheduler(),
        "image_processor": tiny_clip_image_processor(),
    }


def prior_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline that makes image embeddings."""
    return pipeline(pipeline_class, **prior_components())


add("kandinsky22_prior", "KandinskyV22PriorPipeline", prompted(guidance_scale=4.0), PRIOR_TAGS, prior_pipeline, EMBEDS)
add(
    "kandinsky22_prior_image",
    "KandinskyV22PriorEmb2EmbPipeline",
    prompted(**IMG2IMG, image=pil_image, guidance_scale=4.0),
    PRIOR_TAGS,
    prior_pipeline,
    EMBEDS,
)
add("kandinsky_prior", "KandinskyPriorPipeline", prompted(guidance_scale=4.0), PRIOR_TAGS, prior_pipeline, EMBEDS)

SIMPLE_UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 8,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "layers_per_block": 2,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
    "resnet_time_scale_shift": "scale_shift",
}
"""UNet with added key and value attention, as the unCLIP models have it."""


def tiny_unet_22(**options: Any) -> diffusers.ModelMixin:
    """The decoder of Kandinsky 2.2: image embeddings only."""
    image = {"addition_embed_type": "image", "encoder_hid_dim": WIDTH, "encoder_hid_dim_type": "image_proj"}
    return diffusers.UNet2DConditionModel(**(SIMPLE_UNET | image | options))


def tiny_movq(levels: int = 2) -> diffusers.ModelMixin:
    """VQModel with spatial norms; scale factor 2 ** (levels - 1)."""
    return diffusers.VQModel(
        block_out_channels=[32] * levels,
        down_block_types=["DownEncoderBlock2D"] * (levels - 1) + ["AttnDownEncoderBlock2D"],
        up_block_types=["AttnUpDecoderBlock2D"] + ["UpDecoderBlock2D"] * (levels - 1),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )


def kandinsky_scheduler() -> diffusers.SchedulerMixin:
    """The schedule of the decoders."""
    return diffusers.DDIMScheduler(
        beta_schedule="linear", beta_start=0.00085, beta_end=0.012, clip_sample=False, set_alpha_to_one=False
    )


def decoder_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline that makes images of image embeddings."""
    defaults = {"unet": tiny_unet_22, "movq": tiny_movq, "scheduler": kandinsky_scheduler}
    return pipeline(pipeline_class, **fill(defaults, components))


def _embeds(seed: int) -> torch.Tensor:
    return image_tensor(8, 1, seed).reshape(1, -1)[:, :WIDTH]


def mask_array() -> Any:
    """A mask whose upper left quarter is kept."""
    mask = torch.zeros(32, 32)
    mask[:16, :16] = 1.0
    return mask.numpy()


SIZE = {"height": 32, "width": 32, "guidance_scale": 4.0}
FROM_PRIOR = {"image_embeds": lambda: _embeds(1), "negative_image_embeds": lambda: _embeds(2)}
DECODE = {**SIZE, **FROM_PRIOR}
TAGS = "image unet movq"

add("kandinsky22", "KandinskyV22Pipeline", call(**DECODE), TAGS, decoder_pipeline)
add(
    "kandinsky22_img2img",
    "KandinskyV22Img2ImgPipeline",
    call(**DECODE, **IMG2IMG, image=pil_image),
    TAGS,
    decoder_pipeline,
)
add(
    "kandinsky22_inpaint",
    "KandinskyV22InpaintPipeline",
    call(**DECODE, image=pil_image, mask_image=mask_array),
    TAGS,
    decoder_pipeline,
    unet=lambda: tiny_unet_22(in_channels=9),
)
add(
    "kandinsky22_controlnet",
    "KandinskyV22ControlnetPipeline",
    call(**{**DECODE, "height": 64, "width": 64}, hint=lambda: image_tensor(64)),
    TAGS,
    decoder_pipeline,
    unet=lambda: tiny_unet_22(in_channels=8, addition_embed_type="image_hint"),
    movq=lambda: tiny_movq(4),
)
add(
    "kandinsky22_controlnet_img2img",
    "KandinskyV22ControlnetImg2ImgPipeline",
    call(**DECODE, **IMG2IMG, hint=image_tensor, image=pil_image),
    TAGS,
    decoder_pipeline,
    unet=lambda: tiny_unet_22(in_channels=8, addition_embed_type="image_hint"),
    movq=lambda: tiny_movq(4),
)


def combined_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """Prior and decoder in one."""
    prior = {f"prior_{name}": item for name, item in prior_components().items()}
    return decoder_pipeline(pipeline_class, **prior, **components)


BOTH = {**SIZE, "prior_num_inference_steps": 2}
BOTH_TAGS = f"{TAGS} {PRIOR_TAGS}"

add("kandinsky22_combined", "KandinskyV22CombinedPipeline", prompted(**BOTH), BOTH_TAGS, combined_pipeline)
add(
    "kandinsky22_combined_img2img",
    "KandinskyV22Img2ImgCombinedPipeline",
    prompted(**BOTH, **IMG2IMG, image=pil_image),
    BOTH_TAGS,
    combined_pipeline,
)
add(
    "kandinsky22_combined_inpaint",
    "KandinskyV22InpaintCombinedPipeline",
    prompted(**BOTH, image=pil_image, mask_image=mask_array),
    BOTH_TAGS,
    combined_pipeline,
    unet=lambda: tiny_unet_22(in_channels=9),
)


def tiny_unet_21(**options: Any) -> diffusers.ModelMixin:
    """The decoder of Kandinsky 2.1: text and image embeddings."""
    both = {"addition_embed_type": "text_image", "encoder_hid_dim": WIDTH, "encoder_hid_dim_type": "text_image_proj"}
    return diffusers.UNet2DConditionModel(**(SIMPLE_UNET | both | options))


def tiny_mclip() -> Any:
    """MultilingualCLIP."""
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    config = MCLIPConfig(
        numDims=WIDTH,
        transformerDimensions=WIDTH,
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_attention_heads=4,
        num_hidden_layers=LAYERS,
    )
    return MultilingualCLIP(config)


def kandinsky21_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline that makes images of text and image embeddings."""
    defaults = {"unet": tiny_unet_21, "text_encoder": tiny_mclip, "tokenizer": build_xlm_roberta_tokenizer}
    return decoder_pipeline(pipeline_class, **fill(defaults, components))


TAGS_21 = TAGS + " mclip"

add("kandinsky21", "KandinskyPipeline", prompted(**DECODE), TAGS_21, kandinsky21_pipeline)
add(
    "kandinsky21_img2img",
    "KandinskyImg2ImgPipeline",
    prompted(**DECODE, **IMG2IMG, image=pil_image),
    TAGS_21,
    kandinsky21_pipeline,
    scheduler=diffusers.DDIMScheduler,
)
add(
    "kandinsky21_inpaint",
    "KandinskyInpaintPipeline",
    prompted(**DECODE, image=pil_image, mask_image=mask_array),
    TAGS_21,
    kandinsky21_pipeline,
    unet=lambda: tiny_unet_21(in_channels=9),
)


def tiny_unet_3() -> diffusers.ModelMixin:
    """Kandinsky3UNet."""
    return diffusers.Kandinsky3UNet(
        time_embedding_dim=4,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(16, 32),
        cross_attention_dim=8,
        encoder_hid_dim=WIDTH,
    )


def kandinsky3_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline of Kandinsky 3 components."""
    return pipeline(
        pipeline_class,
        unet=tiny_unet_3(),
        movq=tiny_movq(),
        text_encoder=tiny_t5(),
        tokenizer=build_t5_tokenizer(128),
        scheduler=diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    )


add(
    "kandinsky3",
    "Kandinsky3Pipeline",
    prompted(height=32, width=32, negative_prompt=NEGATIVE),
    "image unet t5",
    kandinsky3_pipeline,
)
add(
    "kandinsky3_img2img",
    "Kandinsky3Img2ImgPipeline",
    prompted(**IMG2IMG, image=image_tensor, negative_prompt=NEGATIVE),
    "image unet t5",
    kandinsky3_pipeline,
)
