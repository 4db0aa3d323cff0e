"""Flux.1 and its variants."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_flow
from factory.core import NO_RELOAD, add, fields_output, fill, pipeline, register
from factory.inputs import IMG2IMG, NEGATIVE, PROMPT, image_tensor, mask_image, pil_image, prompted
from factory.text import WIDTH, tiny_clip_text, tiny_t5
from factory.tokenizers import build_clip_tokenizer, build_t5_tokenizer
from factory.vision import tiny_siglip_image_processor, tiny_siglip_vision

TAGS = "image dit clip t5"
SIZE = {"height": 16, "width": 16, "max_sequence_length": 32}


def flux_options() -> dict[str, Any]:
    """The configuration that the transformer shares with its ControlNet."""
    return {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 4,
        "num_single_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "axes_dims_rope": [4, 4, 8],
        "guidance_embeds": True,
    }


def tiny_flux(**options: Any) -> diffusers.ModelMixin:
    """FluxTransformer2DModel with four double and four single blocks."""
    return diffusers.FluxTransformer2DModel(**(flux_options() | options))


def flux_components(**components: Any) -> dict[str, Any]:
    """Components of a Flux pipeline; arguments replace or add some."""
    defaults = {
        "transformer": tiny_flux,
        "vae": lambda: tiny_vae_flow(channels=(8, 16)),
        "text_encoder": tiny_clip_text,
        "text_encoder_2": tiny_t5,
        "tokenizer": build_clip_tokenizer,
        "tokenizer_2": build_t5_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return fill(defaults, components)


def flux_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Flux components."""
    return pipeline(pipeline_class, **flux_components(**components))


@register("flux", "FluxPipeline", prompted(**SIZE), TAGS)
def flux() -> DiffusionPipeline:
    """Text to image."""
    return flux_pipeline("FluxPipeline")


FILL = {**SIZE, "image": lambda: image_tensor(16), "mask_image": lambda: mask_image(16)}
IMAGE = {**SIZE, **IMG2IMG, "image": lambda: image_tensor(16)}
INPAINT = {**FILL, **IMG2IMG}
CONTROL = {"control_image": lambda: image_tensor(16, seed=1)}


def tiny_flux_control() -> diffusers.ModelMixin:
    """Transformer that takes the packed control latents beside its own."""
    return tiny_flux(in_channels=32, out_channels=16)


def tiny_flux_controlnet(**options: Any) -> diffusers.ModelMixin:
    """FluxControlNetModel with two double and two single blocks."""
    return diffusers.FluxControlNetModel(**(flux_options() | {"num_layers": 2, "num_single_layers": 2} | options))


def two_flux_controlnets() -> diffusers.ModelMixin:
    """FluxMultiControlNetModel of two."""
    return diffusers.FluxMultiControlNetModel([tiny_flux_controlnet(), tiny_flux_controlnet()])


add("flux_cfg", "FluxPipeline", prompted(**SIZE, negative_prompt=NEGATIVE, true_cfg_scale=2.0), TAGS, flux_pipeline)
add("flux_img2img", "FluxImg2ImgPipeline", prompted(**IMAGE), TAGS, flux_pipeline)
add("flux_inpaint", "FluxInpaintPipeline", prompted(**INPAINT), TAGS, flux_pipeline)
add(
    "flux_fill",
    "FluxFillPipeline",
    prompted(**FILL),
    TAGS,
    flux_pipeline,
    transformer=lambda: tiny_flux(in_channels=48, out_channels=16),
)
add(
    "flux_kontext",
    "FluxKontextPipeline",
    prompted(**SIZE, image=lambda: image_tensor(16), _auto_resize=False, max_area=16 * 16),
    TAGS,
    flux_pipeline,
)
add(
    "flux_kontext_inpaint",
    "FluxKontextInpaintPipeline",
    prompted(**INPAINT, _auto_resize=False, max_area=16 * 16),
    TAGS,
    flux_pipeline,
)
add(
    "flux_control",
    "FluxControlPipeline",
    prompted(**SIZE, **CONTROL),
    TAGS,
    flux_pipeline,
    transformer=tiny_flux_control,
)
add(
    "flux_control_img2img",
    "FluxControlImg2ImgPipeline",
    prompted(**IMAGE, **CONTROL),
    TAGS,
    flux_pipeline,
    transformer=tiny_flux_control,
)
add(
    "flux_control_inpaint",
    "FluxControlInpaintPipeline",
    prompted(**INPAINT, **CONTROL),
    TAGS,
    flux_pipeline,
    transformer=tiny_flux_control,
)
add(
    "flux_controlnet",
    "FluxControlNetPipeline",
    prompted(**SIZE, **CONTROL),
    TAGS + " controlnet",
    flux_pipeline,
    controlnet=tiny_flux_controlnet,
)
add(
    "flux_multi_controlnet",
    "FluxControlNetPipeline",
    prompted(
        **SIZE,
        control_image=lambda: [image_tensor(16), image_tensor(16, seed=1)],
        controlnet_conditioning_scale=[1.0, 0.5],
        control_mode=[0, 1],
    ),
    f"{TAGS} controlnet multicontrolnet {NO_RELOAD}",
    flux_pipeline,
    controlnet=two_flux_controlnets,
)
add(
    "flux_controlnet_img2img",
    "FluxControlNetImg2ImgPipeline",
    prompted(**IMAGE, **CONTROL),
    TAGS + " controlnet",
    flux_pipeline,
    controlnet=tiny_flux_controlnet,
)
add(
    "flux_controlnet_inpaint",
    "FluxControlNetInpaintPipeline",
    prompted(**INPAINT, **CONTROL),
    TAGS + " controlnet",
    flux_pipeline,
    controlnet=tiny_flux_controlnet,
)


@register(
    "flux_redux",
    "FluxPriorReduxPipeline",
    lambda: {"image": pil_image(), "prompt": PROMPT},
    "prior clip t5 siglip",
    fields_output("prompt_embeds", "pooled_prompt_embeds"),
)
def flux_redux() -> DiffusionPipeline:
    """Image and text to the embeddings that Flux takes."""
    from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder

    text = {
        name: item for name, item in flux_components(vae=None, transformer=None).items() if name[:4] in ("text", "toke")
    }
    return pipeline(
        "FluxPriorReduxPipeline",
        image_encoder=tiny_siglip_vision(),
        feature_extractor=tiny_siglip_image_processor(),
        image_embedder=ReduxImageEncoder(redux_dim=WIDTH, txt_in_features=WIDTH),
        **text,
    )
