"""The package's loggers: below diffusers' own, so that its verbosity, handlers and format count for them."""

from __future__ import annotations

import logging

from diffusers.utils import logging as diffusers_logging


def get_logger(module: str) -> logging.Logger:
    """The logger of a module of this package.

    `diffusers.utils.logging` sets up the logger `"diffusers"` alone, so only names below that follow `set_verbosity`.

    Args:
        module (`str`): Its `__name__`.

    Example:
        >>> get_logger("diffusers_layerwise.fitting").name
        'diffusers.diffusers_layerwise.fitting'
    """
    found: logging.Logger = diffusers_logging.get_logger(f"diffusers.{module}")
    return found
