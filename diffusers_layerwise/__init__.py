"""Layer-by-layer offload for diffusers: one line, any pipeline, the same image.

    import diffusers_layerwise
    pipe = DiffusionPipeline.from_pretrained(...)
    pipe.enable_layerwise_offload(memory_budget="8GiB")

Importing this package puts `enable_layerwise_offload`, `disable_layerwise_offload` and `layerwise_offload` on
`DiffusionPipeline`. It initialises no device.
"""

from .config import LayerwiseOffloadConfig
from .discovery import register_layers
from .errors import LayerwiseOffloadError
from .handle import OffloadHandle
from .hardware import Hardware
from .pipeline import (
    apply_layerwise_offload,
    attach_methods,
    disable_layerwise_offload,
    enable_layerwise_offload,
)
from .plan import OffloadPlan
from .planning import plan_layerwise_offload
from .predict import PredictedPlan
from .profiles import OffloadProfile, register_profile

__version__ = "0.1.0"

attach_methods()

__all__ = [
    "Hardware",
    "LayerwiseOffloadConfig",
    "LayerwiseOffloadError",
    "OffloadHandle",
    "OffloadPlan",
    "OffloadProfile",
    "PredictedPlan",
    "apply_layerwise_offload",
    "disable_layerwise_offload",
    "enable_layerwise_offload",
    "plan_layerwise_offload",
    "register_layers",
    "register_profile",
]
