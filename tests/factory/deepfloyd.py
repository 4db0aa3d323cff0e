"""DeepFloyd IF, UnCLIP and Shap-E: cascades that work on pixels or fields."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.core import NO_RELOAD, add, fill, pipeline, register
from factory.inputs import DROP, IMG2IMG, NEGATIVE, call, image_tensor, mask_image, pil_image, prompted
from factory.kandinsky import SIMPLE_UNET
from factory.text import WIDTH, tiny_clip_text_projection, tiny_t5
from factory.tokenizers import build_clip_tokenizer, build_t5_tokenizer
from factory.unets import tiny_prior
from factory.vision import tiny_clip_image_processor, tiny_clip_vision, tiny_clip_vision_model

TAGS = "image pixel unet t5"


def if_scheduler() -> diffusers.SchedulerMixin:
    """The schedule of the IF stages."""
    return diffusers.DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        thresholding=True,
        dynamic_thresholding_ratio=0.95,
        sample_max_value=1.0,
        variance_type="learned_range",
    )


def tiny_unet_if(**options: Any) -> diffusers.ModelMixin:
    """UNet of the first stage."""
    defaults = {
        "sample_size": 32,
        "in_channels": 3,
        "out_channels": 6,
        "encoder_hid_dim": WIDTH,
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "cross_attention_norm": "group_norm",
        "act_fn": "gelu",
        "attention_head_dim": 8,
    }
    return diffusers.UNet2DConditionModel(**(SIMPLE_UNET | {"cross_attention_dim": 32} | defaults | options))


def tiny_unet_if_upscale() -> diffusers.ModelMixin:
    """UNet of the later stages, which also takes the low resolution image and its noise level."""
    return tiny_unet_if(
        in_channels=6,
        class_embed_type="timestep",
        mid_block_scale_factor=1.414,
        time_embedding_act_fn="gelu",
        time_embedding_dim=32,
    )


def if_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of IF components without safety checker and watermark."""
    defaults = {
        "unet": tiny_unet_if,
        "text_encoder": tiny_t5,
        "tokenizer": lambda: build_t5_tokenizer(77),
        "scheduler": if_scheduler,
    }
    return pipeline(pipeline_class, **fill(defaults, components))


def if_upscale_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline of IF components for the second stage."""
    noising = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    return if_pipeline(pipeline_class, unet=tiny_unet_if_upscale(), image_noising_scheduler=noising)


TEXT = {"negative_prompt": NEGATIVE, "clean_caption": False}
IMAGE = {**TEXT, **IMG2IMG, "image": image_tensor}
UPSCALE = {**TEXT, "image": lambda: image_tensor(16)}
BIG = {"original_image": image_tensor, **IMG2IMG}

add("if", "IFPipeline", prompted(**TEXT), TAGS, if_pipeline)
add("if_img2img", "IFImg2ImgPipeline", prompted(**IMAGE), TAGS, if_pipeline)
add("if_inpaint", "IFInpaintingPipeline", prompted(**IMAGE, mask_image=mask_image), TAGS, if_pipeline)
add("if_upscale", "IFSuperResolutionPipeline", prompted(**UPSCALE, height=32, width=32), TAGS, if_upscale_pipeline)
add(
    "if_upscale_img2img",
    "IFImg2ImgSuperResolutionPipeline",
    prompted(**UPSCALE, **BIG),
    f"{TAGS} {NO_RELOAD}",
    if_upscale_pipeline,
)
add(
    "if_upscale_inpaint",
    "IFInpaintingSuperResolutionPipeline",
    prompted(**UPSCALE, **BIG, mask_image=mask_image),
    TAGS,
    if_upscale_pipeline,
)


def unclip_components() -> dict[str, Any]:
    """The decoder and the two upscalers of UnCLIP."""
    from diffusers.pipelines.deprecated.unclip.text_proj import UnCLIPTextProjModel

    decoder = SIMPLE_UNET | {"sample_size": 16, "in_channels": 3, "out_channels": 6, "class_embed_type": "identity"}
    upscaler = {
        "sample_size": 32,
        "layers_per_block": 1,
        "down_block_types": ("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
        "up_block_types": ("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
        "block_out_channels": (16, 32),
        "norm_num_groups": 8,
        "in_channels": 6,
        "out_channels": 3,
    }
    return {
        "text_encoder": tiny_clip_text_projection(),
        "tokenizer": build_clip_tokenizer(),
        "text_proj": UnCLIPTextProjModel(clip_embeddings_dim=WIDTH, time_embed_dim=64, cross_attention_dim=WIDTH),
        "decoder": diffusers.UNet2DConditionModel(**decoder),
        "super_res_first": diffusers.UNet2DModel(**upscaler),
        "super_res_last": diffusers.UNet2DModel(**upscaler),
        "decoder_scheduler": diffusers.UnCLIPScheduler(variance_type="learned_range", prediction_type="epsilon"),
        "super_res_scheduler": diffusers.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="epsilon"),
    }


UNCLIP_TAGS = f"image pixel unet clip {NO_RELOAD}"
"""model_index.json names UnCLIPTextProjModel as if diffusers exported it."""

UNCLIP_STEPS = {
    "num_inference_steps": DROP,
    "decoder_num_inference_steps": 2,
    "super_res_num_inference_steps": 2,
}


@register("unclip", "UnCLIPPipeline", prompted(**UNCLIP_STEPS, prior_num_inference_steps=2), f"{UNCLIP_TAGS} prior")
def unclip() -> DiffusionPipeline:
    """Text to image through a prior, a decoder and two upscalers."""
    scheduler = diffusers.UnCLIPScheduler(
        variance_type="fixed_small_log", prediction_type="sample", clip_sample_range=5.0
    )
    return pipeline("UnCLIPPipeline", prior=tiny_prior(), prior_scheduler=scheduler, **unclip_components())


@register(
    "unclip_variation",
    "UnCLIPImageVariationPipeline",
    call(**UNCLIP_STEPS, image=pil_image),
    f"{UNCLIP_TAGS} clip_vision",
)
def unclip_variation() -> DiffusionPipeline:
    """Image to image through an image encoder, a decoder and two upscalers."""
    return pipeline(
        "UnCLIPImageVariationPipeline",
        image_encoder=tiny_clip_vision(),
        feature_extractor=tiny_clip_image_processor(),
        **unclip_components(),
    )


def shap_e_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Shap-E components."""
    from diffusers.pipelines.shap_e.renderer import ShapERenderer

    prior = diffusers.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=16,
        embedding_dim=16,
        num_embeddings=32,
        embedding_proj_dim=WIDTH,
        time_embed_dim=64,
        num_layers=4,
        clip_embed_dim=32,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        embedding_proj_norm_type="layer" if "Img2Img" in pipeline_class else None,
        encoder_hid_proj_type=None,
        added_emb_type=None,
    )
    scheduler = diffusers.HeunDiscreteScheduler(
        beta_schedule="exp",
        num_train_timesteps=1024,
        prediction_type="sample",
        use_karras_sigmas=True,
        clip_sample=True,
        clip_sample_range=1.0,
    )
    renderer = ShapERenderer(
        param_shapes=((8, 93), (8, 8), (8, 8), (8, 8)), d_latent=16, d_hidden=8, n_output=12, background=(0.1, 0.1, 0.1)
    )
    return pipeline(pipeline_class, prior=prior, scheduler=scheduler, shap_e_renderer=renderer, **components)


SHAP_E = {"output_type": "latent", "frame_size": 32}

add(
    "shap_e",
    "ShapEPipeline",
    prompted(**SHAP_E),
    "field prior clip idle:shap_e_renderer",
    shap_e_pipeline,
    text_encoder=tiny_clip_text_projection,
    tokenizer=build_clip_tokenizer,
)
add(
    "shap_e_image",
    "ShapEImg2ImgPipeline",
    call(**SHAP_E, image=pil_image),
    "field prior clip_vision idle:shap_e_renderer",
    shap_e_pipeline,
    image_encoder=tiny_clip_vision_model,
    image_processor=tiny_clip_image_processor,
)
