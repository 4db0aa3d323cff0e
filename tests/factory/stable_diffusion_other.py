"""Less common pipelines on the components of Stable Diffusion 1.x, and Marigold."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from factory.autoencoders import tiny_vae_kl
from factory.core import NO_RELOAD, add, fields_output, pipeline
from factory.inputs import NEGATIVE, call, image_tensor, mask_image, pil_image, prompted
from factory.stable_diffusion import SIZE, sd_components, sd_pipeline, sd_scheduler
from factory.text import WIDTH
from factory.unets import tiny_unet_sd
from factory.vision import tiny_clip_image_processor, tiny_clip_vision

TAGS = "image unet clip"
TEXT = {**SIZE, "negative_prompt": NEGATIVE}
BOX = {"gligen_phrases": ["a red fox"], "gligen_boxes": [[0.2, 0.3, 0.6, 0.7]]}

add("sd15_sag", "StableDiffusionSAGPipeline", prompted(**TEXT, sag_scale=0.75), TAGS, sd_pipeline)
add("sd15_panorama", "StableDiffusionPanoramaPipeline", prompted(**{**TEXT, "width": 144}), TAGS, sd_pipeline)
add(
    "sd15_attend",
    "StableDiffusionAttendAndExcitePipeline",
    prompted(**SIZE, token_indices=[2, 5], max_iter_to_alter=2, thresholds={0: 0.0}, attn_res=(8, 8)),
    TAGS + " autograd",
    sd_pipeline,
)
add(
    "sd15_ldm3d",
    "StableDiffusionLDM3DPipeline",
    prompted(**TEXT, output_type="np"),
    TAGS,
    sd_pipeline,
    fields_output("rgb", "depth"),
    vae=lambda: tiny_vae_kl(in_channels=6, out_channels=6),
)
add(
    "sd15_gligen",
    "StableDiffusionGLIGENPipeline",
    prompted(**TEXT, **BOX),
    TAGS,
    sd_pipeline,
    unet=lambda: tiny_unet_sd(attention_type="gated"),
)
add(
    "sd15_semantic",
    "SemanticStableDiffusionPipeline",
    prompted(
        **SIZE,
        editing_prompt=["a red fox", "snow"],
        reverse_editing_direction=[False, True],
        edit_warmup_steps=[0, 0],
        edit_guidance_scale=[5, 4],
    ),
    TAGS,
    sd_pipeline,
)


def diffedit_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline with an inverse scheduler."""
    return sd_pipeline(pipeline_class, inverse_scheduler=diffusers.DDIMInverseScheduler())


add(
    "sd15_diffedit",
    "StableDiffusionDiffEditPipeline",
    prompted(
        mask_image=lambda: image_tensor(16, 1)[:, 0].round(),
        image_latents=lambda: image_tensor(16, 4).repeat(1, 2, 1, 1, 1),
        negative_prompt=NEGATIVE,
        inpaint_strength=0.7,
        num_inference_steps=3,
    ),
    TAGS,
    diffedit_pipeline,
)


def example_pipeline(pipeline_class: str) -> DiffusionPipeline:
    """A pipeline that is shown an example image instead of a prompt."""
    from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder

    encoder = PaintByExampleImageEncoder(tiny_clip_vision().config, proj_size=WIDTH)
    return pipeline(
        pipeline_class,
        unet=tiny_unet_sd(in_channels=9),
        vae=tiny_vae_kl(),
        image_encoder=encoder,
        feature_extractor=tiny_clip_image_processor(),
        scheduler=sd_scheduler(),
    )


add(
    "paint_by_example",
    "PaintByExamplePipeline",
    call(example_image=lambda: pil_image(seed=1), image=pil_image, mask_image=mask_image, guidance_scale=4.0),
    f"image unet clip_vision {NO_RELOAD}",
    example_pipeline,
)


def marigold_pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """A pipeline that predicts a map from an image; the prompt is empty."""
    options = {"prediction_type": "v_prediction", "beta_schedule": "scaled_linear", "clip_sample": False}
    scheduler = diffusers.DDIMScheduler(**options, set_alpha_to_one=False, steps_offset=1)
    defaults = {"unet": tiny_unet_sd(in_channels=8), "scheduler": scheduler}
    return pipeline(pipeline_class, **sd_components(**(defaults | components)))


MAP_TAGS = TAGS + " idle:text_encoder"
"""The embeddings of the empty prompt are kept from the first call."""

MAP = {"image": image_tensor, "processing_resolution": 0}

add("marigold_depth", "MarigoldDepthPipeline", call(**MAP), MAP_TAGS, marigold_pipeline)
add("marigold_normals", "MarigoldNormalsPipeline", call(**MAP), MAP_TAGS, marigold_pipeline)
add(
    "marigold_intrinsics",
    "MarigoldIntrinsicsPipeline",
    call(**MAP),
    MAP_TAGS,
    marigold_pipeline,
    unet=lambda: tiny_unet_sd(in_channels=12, out_channels=8),
    target_properties=lambda: {"target_names": ["albedo", "roughness"]},
)
