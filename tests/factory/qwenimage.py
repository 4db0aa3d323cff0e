"""Qwen-Image."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_qwen
from factory.core import NO_RELOAD, add, fill, pipeline, register, shrink
from factory.inputs import IMG2IMG, NEGATIVE, image_tensor, mask_image, pil_image, prompted
from factory.multimodal import VisionLanguageProcessor, tiny_qwen2_5_vl
from factory.text import WIDTH
from factory.tokenizers import build_qwen2_tokenizer

TAGS = "image dit qwen2_5_vl"
SIZE = {"height": 32, "width": 32, "max_sequence_length": 32, "negative_prompt": NEGATIVE, "true_cfg_scale": 2.0}


def qwenimage_options() -> dict[str, Any]:
    """The configuration that the transformer shares with its ControlNet."""
    return {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
        "axes_dims_rope": (8, 4, 4),
    }


def tiny_qwenimage(**options: Any) -> diffusers.ModelMixin:
    """QwenImageTransformer2DModel of four blocks."""
    return diffusers.QwenImageTransformer2DModel(**(qwenimage_options() | options))


def qwenimage_components(**components: Any) -> dict[str, Any]:
    """Components of a Qwen-Image pipeline; arguments replace or add some."""
    defaults = {
        "transformer": tiny_qwenimage,
        "vae": tiny_vae_qwen,
        "text_encoder": tiny_qwen2_5_vl,
        "tokenizer": build_qwen2_tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
    }
    return fill(defaults, components)


def qwenimage_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline of Qwen-Image components."""
    return pipeline(pipeline_class, **qwenimage_components(**components))


@register("qwenimage", "QwenImagePipeline", prompted(**SIZE), TAGS)
def qwenimage() -> DiffusionPipeline:
    """Text to image."""
    return qwenimage_pipeline("QwenImagePipeline")


EDIT_TAGS = f"image dit qwen2_5_vl vision {NO_RELOAD}"
IMAGE = {**SIZE, **IMG2IMG, "image": image_tensor}
INPAINT = {**IMAGE, "mask_image": mask_image}
EDIT = {**SIZE, "height": 64, "width": 64}
CONTROL = {"control_image": lambda: image_tensor(seed=1)}


def tiny_qwen_controlnet(**options: Any) -> diffusers.ModelMixin:
    """QwenImageControlNetModel of two blocks."""
    return diffusers.QwenImageControlNetModel(**(qwenimage_options() | {"num_layers": 2} | options))


def editing_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline that also shows its images to the text encoder, at 128x128 pixels where diffusers says 1024x1024."""
    name = {
        "QwenImageEditPipeline": "edit",
        "QwenImageEditInpaintPipeline": "edit_inpaint",
        "QwenImageEditPlusPipeline": "edit_plus",
        "QwenImageLayeredPipeline": "layered",
    }[pipeline_class]
    shrink(f"qwenimage.pipeline_qwenimage_{name}")
    return qwenimage_pipeline(pipeline_class, processor=VisionLanguageProcessor(), **components)


add("qwenimage_img2img", "QwenImageImg2ImgPipeline", prompted(**IMAGE), TAGS, qwenimage_pipeline)
add("qwenimage_inpaint", "QwenImageInpaintPipeline", prompted(**INPAINT), TAGS, qwenimage_pipeline)
add(
    "qwenimage_controlnet",
    "QwenImageControlNetPipeline",
    prompted(**SIZE, **CONTROL),
    TAGS + " controlnet",
    qwenimage_pipeline,
    controlnet=tiny_qwen_controlnet,
)
add(
    "qwenimage_controlnet_inpaint",
    "QwenImageControlNetInpaintPipeline",
    prompted(**SIZE, **CONTROL, control_mask=mask_image),
    TAGS + " controlnet",
    qwenimage_pipeline,
    controlnet=lambda: tiny_qwen_controlnet(extra_condition_channels=4),
)
add(
    "qwenimage_edit",
    "QwenImageEditPipeline",
    prompted(**EDIT, image=pil_image),
    EDIT_TAGS,
    editing_pipeline,
)
add(
    "qwenimage_edit_inpaint",
    "QwenImageEditInpaintPipeline",
    prompted(**EDIT, **IMG2IMG, image=pil_image, mask_image=mask_image),
    EDIT_TAGS,
    editing_pipeline,
)
add(
    "qwenimage_edit_plus",
    "QwenImageEditPlusPipeline",
    prompted(**EDIT, image=lambda: [pil_image(), pil_image(seed=1)]),
    EDIT_TAGS,
    editing_pipeline,
)
add(
    "qwenimage_layered",
    "QwenImageLayeredPipeline",
    prompted(image=pil_image, layers=2, resolution=640, true_cfg_scale=2.0, negative_prompt=NEGATIVE),
    EDIT_TAGS,
    editing_pipeline,
)
