"""Tiny pipelines of real diffusers architectures with random weights, for tests; see `CASES` and `run`."""

from __future__ import annotations

import importlib

from factory.core import CASES, IDLE, KNOWN_BROKEN, NO_RELOAD, PipelineCase, generator_kwargs, modules_of, run

FAMILIES = (
    "stable_diffusion",
    "stable_diffusion_xl",
    "stable_diffusion_3",
    "stable_diffusion_control",
    "flux",
    "flux2",
    "wan",
    "ltx",
    "ltx2",
    "qwenimage",
    "hunyuan",
    "hunyuan_dit",
    "lumina",
    "cogvideo",
    "cosmos",
    "easyanimate",
    "z_image",
    "stable_cascade",
    "kandinsky",
    "deepfloyd",
    "kandinsky5",
    "recent",
    "pixel",
    "amused",
    "video_unets",
    "stable_diffusion_other",
    "audio",
    "pixart",
    "sana",
    "animatediff",
    "kolors",
    "pag",
)
"""Modules that register cases, in the order of the table."""

for _family in FAMILIES:
    importlib.import_module(f"factory.{_family}")

CORE = (
    "flux",
    "sd15",
    "sdxl",
    "sd3",
    "wan",
    "wan_two_stage",
    "ltx",
    "qwenimage",
    "hunyuan_video",
    "lumina2",
    "cogvideox",
    "stable_cascade_prior",
    "stable_cascade_decoder",
    "kandinsky22_prior",
    "sd15_controlnet",
    "sd15_multi_controlnet",
)
"""A short list that covers the kinds of pipelines, for tests that can't afford the whole table."""

__all__ = [
    "CASES",
    "CORE",
    "IDLE",
    "KNOWN_BROKEN",
    "NO_RELOAD",
    "PipelineCase",
    "generator_kwargs",
    "modules_of",
    "run",
]
