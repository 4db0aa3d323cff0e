"""The one line that streams a pipeline, within as much device memory as you say.

    python examples/one_liner.py                                                  # the digits that come with this
    python examples/one_liner.py ~/models/FLUX.1-dev "a red fox in the snow" 8GiB

The report says where the weights are; on a CPU with room for all of them that is "resident".
"""

import sys
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

DEFAULTS = [str(Path(__file__).parent / "digits"), "a red seven", "8GiB"]
checkpoint, prompt, memory_budget = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]

pipe = DiffusionPipeline.from_pretrained(checkpoint, dtype=torch.bfloat16)
pipe.enable_layerwise_offload(memory_budget=memory_budget)  # in the place of pipe.to("cuda")
image = pipe(prompt, generator=torch.Generator("cpu").manual_seed(0)).images[0]

image.save("one_liner.png")
print(pipe.layerwise_offload.report())
