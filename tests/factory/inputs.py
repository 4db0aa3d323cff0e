"""Call arguments that many cases share: prompts, images, masks, video frames, audio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

PROMPT = "a painting of a squirrel eating a burger"
NEGATIVE = "bad quality"
STEPS = 2
DROP = object()
"""As the value of an argument: leave it out."""
IMG2IMG: dict[str, Any] = {"num_inference_steps": 3, "strength": 0.7}
"""Arguments with which an image-to-image pipeline runs two steps."""


def image_tensor(size: int = 32, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """A batch of one random image with values in [0, 1)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand((1, channels, size, size), generator=generator)


def pil_image(size: int = 32, seed: int = 0) -> Image.Image:
    """A random RGB image."""
    pixels = (image_tensor(size, 3, seed)[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    return Image.fromarray(pixels)


def mask_image(size: int = 32) -> Image.Image:
    """A black image whose middle is white."""
    pixels = np.zeros((size, size), dtype=np.uint8)
    pixels[size // 4 : -size // 4, size // 4 : -size // 4] = 255
    return Image.fromarray(pixels)


def frames(count: int, size: int = 32) -> list[Image.Image]:
    """Random video frames."""
    return [pil_image(size, seed) for seed in range(count)]


def call(**kwargs: Any) -> Callable[[], dict[str, Any]]:
    """A `call` for `register`: callables among the values are evaluated afresh for every call."""

    def made() -> dict[str, Any]:
        defaults: dict[str, Any] = {"num_inference_steps": STEPS, "output_type": "pt"}
        values = {**defaults, **{key: value() if callable(value) else value for key, value in kwargs.items()}}
        return {key: value for key, value in values.items() if value is not DROP}

    return made


def prompted(**kwargs: Any) -> Callable[[], dict[str, Any]]:
    """Like `call`, with the usual prompt."""
    return call(**({"prompt": PROMPT} | kwargs))
