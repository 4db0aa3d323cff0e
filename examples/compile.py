"""torch.compile and streaming together: each repeated block is compiled once, and its weights stream as ever.

    python examples/compile.py                                   # the digits that come with this, by inductor
    BACKEND=aot_eager python examples/compile.py                 # needs no C++ compiler
    python examples/compile.py ~/models/FLUX.1-dev 8GiB

`compile_repeated_blocks()` compiles what occurs many times, and is quick; `pipe.unet.compile()` takes the denoiser as
one, which then has to be on the device as one.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

CHECKPOINT = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "digits"
MEMORY_BUDGET = sys.argv[2] if len(sys.argv) > 2 else None
BACKEND = os.environ.get("BACKEND", "inductor")

pipe = DiffusionPipeline.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
pipe.set_progress_bar_config(disable=True)
denoiser = pipe.transformer if hasattr(pipe, "transformer") else pipe.unet
denoiser.compile_repeated_blocks(backend=BACKEND)


def paint(title: str) -> np.ndarray:
    generator, begin = torch.Generator("cpu").manual_seed(0), time.perf_counter()
    pixels = pipe("a blue nine", num_inference_steps=10, generator=generator, output_type="np").images[0]
    print(f"{title:24}{time.perf_counter() - begin:6.2f} s")
    return pixels


handle = pipe.enable_layerwise_offload(mode="memory", memory_budget=MEMORY_BUDGET)
paint("streamed, compiling")
streamed = paint("streamed")
print(handle.report())
handle.remove()

# Resident, to compare with; a model that doesn't fit has to do without.
pipe.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
print("the same picture resident:", np.array_equal(paint("resident"), streamed))
pipe.image_processor.numpy_to_pil(streamed)[0].save("compile.png")
