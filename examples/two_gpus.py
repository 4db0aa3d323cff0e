"""A pipeline over two devices by a device map: what the map puts on a device stays there, what it leaves streams.

    python examples/two_gpus.py ~/models/FLUX.1-dev 20GiB 8GiB     # the most of device 0 and of device 1 for weights
    python examples/two_gpus.py                                    # the digits; simulated where there aren't two

The simulated devices come with a clone of the repository and need a C++ compiler (and `pip install ninja setuptools`).
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
if torch.accelerator.device_count() < 2:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import simdev  # before diffusers, which looks for devices once

    simdev.configure(ndev=2)

import numpy as np
from diffusers import DiffusionPipeline

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

CHECKPOINT = sys.argv[1] if len(sys.argv) > 1 else HERE / "digits"
ROOM = dict(enumerate(sys.argv[2:4])) or {0: "3900KB", 1: "900KB"}

pipe = DiffusionPipeline.from_pretrained(CHECKPOINT, dtype=torch.bfloat16, device_map="balanced", max_memory=ROOM)
pipe.set_progress_bar_config(disable=True)
print("device map:", pipe.hf_device_map)  # whole components; what fits on no device is on the "cpu"


def paint() -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe("a yellow four", num_inference_steps=10, generator=generator, output_type="np").images[0]


expected = paint()  # as accelerate runs it
handle = pipe.enable_layerwise_offload()
for _ in range(2):
    print("the same picture:", np.array_equal(paint(), expected))
print(handle.report())
pipe.image_processor.numpy_to_pil(expected)[0].save("two_gpus.png")
