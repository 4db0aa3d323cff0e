"""Stable Diffusion 1.x."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import add, fill, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, call, image_tensor, mask_image, pil_image, prompted
from factory.text import WIDTH, tiny_clip_text, tiny_clip_text_projection
from factory.tokenizers import build_clip_tokenizer
from factory.unets import tiny_prior, tiny_unet_sd
from factory.vision import tiny_clip_image_processor, tiny_clip_vision

SIZE = {"height": 32, "width": 32}


def sd_scheduler() -> diffusers.SchedulerMixin:
    """The usual DDIM schedule."""
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def sd_components(**components: Any) -> dict[str, Any]:
    """Components of a Stable Diffusion pipeline; arguments replace or add some."""
    defaults: dict[str, Any] = {
        "unet": tiny_unet_sd,
        "vae": tiny_vae_kl,
        "text_encoder": tiny_clip_text,
        "tokenizer": build_clip_tokenizer,
        "scheduler": sd_scheduler,
    }
    return fill(defaults, components)


def sd_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Stable Diffusion components without safety checker."""
    return pipeline(pipeline_class, **sd_components(**components))


@register("sd15", "StableDiffusionPipeline", prompted(**SIZE, negative_prompt=NEGATIVE), "image unet clip")
def sd15() -> DiffusionPipeline:
    """Text to image."""
    return sd_pipeline("StableDiffusionPipeline")


TAGS = "image unet clip"
IMAGE = {"image": image_tensor, "negative_prompt": NEGATIVE}
INPAINT = {**SIZE, **IMAGE, "mask_image": mask_image}


def tiny_lcm_unet() -> diffusers.ModelMixin:
    """UNet with guidance embedding."""
    return tiny_unet_sd(time_cond_proj_dim=32)


def tiny_dpt() -> transformers.PreTrainedModel:
    """DPTForDepthEstimation."""
    config = transformers.DPTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    )
    model = transformers.DPTForDepthEstimation(config)
    model.head.head[-2].bias.data.fill_(1.0)  # the last activation must not clip all of the depth map to zero
    return model


add("sd15_img2img", "StableDiffusionImg2ImgPipeline", prompted(**IMAGE, **IMG2IMG), TAGS, sd_pipeline)
add("sd15_inpaint", "StableDiffusionInpaintPipeline", prompted(**INPAINT), TAGS, sd_pipeline)
add(
    "sd15_inpaint_9",
    "StableDiffusionInpaintPipeline",
    prompted(**INPAINT),
    TAGS,
    sd_pipeline,
    unet=lambda: tiny_unet_sd(in_channels=9),
)
add(
    "sd15_pix2pix",
    "StableDiffusionInstructPix2PixPipeline",
    prompted(**IMAGE, image_guidance_scale=1.5),
    TAGS,
    sd_pipeline,
    unet=lambda: tiny_unet_sd(in_channels=8),
)
add(
    "sd2_depth",
    "StableDiffusionDepth2ImgPipeline",
    prompted(image=pil_image, **IMG2IMG),
    TAGS + " depth",
    sd_pipeline,
    unet=lambda: tiny_unet_sd(in_channels=5),
    depth_estimator=tiny_dpt,
    feature_extractor=lambda: transformers.DPTImageProcessor(size={"height": 32, "width": 32}),
)
add(
    "sd2_upscale",
    "StableDiffusionUpscalePipeline",
    prompted(image=image_tensor),
    TAGS,
    sd_pipeline,
    unet=lambda: tiny_unet_sd(in_channels=7, num_class_embeds=100),
    low_res_scheduler=diffusers.DDPMScheduler,
    max_noise_level=lambda: 99,
)
add(
    "lcm",
    "LatentConsistencyModelPipeline",
    prompted(**SIZE),
    TAGS,
    sd_pipeline,
    unet=tiny_lcm_unet,
    scheduler=diffusers.LCMScheduler,
)
add(
    "lcm_img2img",
    "LatentConsistencyModelImg2ImgPipeline",
    prompted(image=image_tensor, **IMG2IMG),
    TAGS,
    sd_pipeline,
    unet=tiny_lcm_unet,
    scheduler=diffusers.LCMScheduler,
)


@register(
    "sd15_variation", "StableDiffusionImageVariationPipeline", call(**SIZE, image=pil_image), "image unet clip_vision"
)
def sd15_variation() -> DiffusionPipeline:
    """Image to image through an image encoder."""
    return pipeline(
        "StableDiffusionImageVariationPipeline",
        unet=tiny_unet_sd(),
        vae=tiny_vae_kl(),
        image_encoder=tiny_clip_vision(),
        feature_extractor=tiny_clip_image_processor(),
        scheduler=sd_scheduler(),
    )


@register(
    "sd2_latent_upscale", "StableDiffusionLatentUpscalePipeline", prompted(image=lambda: image_tensor(8, 4)), TAGS
)
def sd2_latent_upscale() -> DiffusionPipeline:
    """Latents to an image twice as large, with a K-diffusion UNet."""
    unet = diffusers.UNet2DConditionModel(
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        block_out_channels=[32, 32, 64, 64],
        time_cond_proj_dim=160,
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=WIDTH,
        down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        in_channels=8,
        out_channels=5,
        mid_block_type=None,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
    )
    scheduler = diffusers.EulerDiscreteScheduler(prediction_type="sample")
    return pipeline("StableDiffusionLatentUpscalePipeline", **sd_components(unet=unet, scheduler=scheduler))


def _unclip(**components: Any) -> dict[str, Any]:
    """Components of the unCLIP variants of Stable Diffusion 2."""
    from diffusers.pipelines.stable_diffusion import StableUnCLIPImageNormalizer

    unet = tiny_unet_sd(class_embed_type="projection", projection_class_embeddings_input_dim=2 * WIDTH)
    return sd_components(
        unet=unet,
        image_normalizer=StableUnCLIPImageNormalizer(embedding_dim=WIDTH),
        image_noising_scheduler=diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
        **components,
    )


@register("stable_unclip", "StableUnCLIPPipeline", prompted(**SIZE, prior_num_inference_steps=2), TAGS + " prior")
def stable_unclip() -> DiffusionPipeline:
    """Text to image through a prior."""
    prior_scheduler = diffusers.DDPMScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
    )
    return pipeline(
        "StableUnCLIPPipeline",
        prior=tiny_prior(),
        prior_text_encoder=tiny_clip_text_projection(),
        prior_tokenizer=build_clip_tokenizer(),
        prior_scheduler=prior_scheduler,
        **_unclip(),
    )


@register(
    "stable_unclip_img2img", "StableUnCLIPImg2ImgPipeline", prompted(**SIZE, image=pil_image), TAGS + " clip_vision"
)
def stable_unclip_img2img() -> DiffusionPipeline:
    """Image and text to image through image embeddings."""
    return pipeline(
        "StableUnCLIPImg2ImgPipeline",
        image_encoder=tiny_clip_vision(),
        feature_extractor=tiny_clip_image_processor(),
        **_unclip(),
    )
