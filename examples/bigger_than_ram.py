"""A checkpoint that is larger than the host's memory: weights are read from its files each time they are needed.

    python examples/bigger_than_ram.py                    # all weights stay in their files
    HOST_MEMORY=16GiB MEMORY_BUDGET=8GiB python examples/bigger_than_ram.py ~/models/FLUX.1-dev

What is used most often is held in the host memory that you allow, the rest is streamed from the disk. A step then takes
at least the time to read that. Buffers to read into (16 MiB on a CPU, 32 MiB for each GPU) are part of the host memory,
so allow more than these. The digits are smaller than the buffers: without HOST_MEMORY, nothing is held.
"""

import os
import sys
from pathlib import Path

import torch

import diffusers_layerwise

CHECKPOINT = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "digits"

# Where the files have the dtype, DiffusionPipeline.from_pretrained does the same; where they haven't, it would make a
# copy in memory, and this makes one on the disk, once.
pipe = diffusers_layerwise.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
HOST_MEMORY = os.environ.get("HOST_MEMORY")
handle = pipe.enable_layerwise_offload(
    mode="memory",
    memory_budget=os.environ.get("MEMORY_BUDGET", "2MiB"),
    config={"host_memory_budget": HOST_MEMORY} if HOST_MEMORY else {"host": "file"},
)
image = pipe("a yellow two", num_inference_steps=20, generator=torch.Generator("cpu").manual_seed(0)).images[0]
image.save("bigger_than_ram.png")

print(handle.report())
report = handle.report().to_dict()
print(f"{report['weights'] / 2**20:.2f} MiB of weights, {report['disk_bytes'] / 2**20:.2f} MiB read from the files")
for part in report["components"]:
    print(f"  {part['name']:16}each pass reads {part['read_bytes'] / 2**20:.2f} MiB from its files")
