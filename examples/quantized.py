"""A denoiser in int8 by torchao that streams as well: half the bytes to move, and the same picture as resident.

    pip install torchao && python examples/quantized.py
    python examples/quantized.py ~/models/FLUX.1-dev 8GiB

The same goes for bitsandbytes, optimum-quanto and GGUF checkpoints. What quantising changes in the picture it changes;
streaming changes nothing on top of that.
"""

import sys
from pathlib import Path

try:
    from torchao.quantization import Int8WeightOnlyConfig
except ImportError:
    raise SystemExit("This example quantises with torchao, which isn't installed: pip install torchao") from None

import numpy as np
import torch
from diffusers import DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

CHECKPOINT = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "digits"
MEMORY_BUDGET = sys.argv[2] if len(sys.argv) > 2 else None

parts = DiffusionPipeline.load_config(CHECKPOINT)
denoiser = "transformer" if "transformer" in parts else "unet"
quantization = PipelineQuantizationConfig(quant_mapping={denoiser: TorchAoConfig(Int8WeightOnlyConfig())})
pipe = DiffusionPipeline.from_pretrained(CHECKPOINT, dtype=torch.bfloat16, quantization_config=quantization)
pipe.set_progress_bar_config(disable=True)


def paint() -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe("a red eight", num_inference_steps=10, generator=generator, output_type="np").images[0]


handle = pipe.enable_layerwise_offload(mode="memory", memory_budget=MEMORY_BUDGET)
streamed = paint()
print(handle.report())
handle.remove()

# Resident, to compare with; a model that doesn't fit has to do without.
pipe.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
print("the same picture resident:", np.array_equal(paint(), streamed))
pipe.image_processor.numpy_to_pil(streamed)[0].save("quantized.png")
