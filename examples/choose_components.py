"""Which components stream, and how much of each stays resident: four selections, and what they come to.

    python examples/choose_components.py
    python examples/choose_components.py ~/models/FLUX.1-dev

The names are the pipeline's own (`unet`, `text_encoder_2`) or those of sets (`dit` is every denoiser, `vae`,
`text_encoder`, `all`). The picture is the same each time, bit for bit.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)

CHECKPOINT = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "digits"

SELECTIONS = {
    "everything streams": {"components": "all", "mode": "memory"},
    "only the denoiser streams": {"components": ["dit"], "mode": "memory"},
    "all but the VAE streams": {"components": ["all", "!vae"], "mode": "memory"},
    "by hand": {
        "components": {"dit": {"resident": 0.5}, "text_encoder": "offload", "vae": "resident"},
        "mode": "manual",
    },
}

pipe = DiffusionPipeline.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
pipe.set_progress_bar_config(disable=True)


def paint() -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe("a green three", num_inference_steps=10, generator=generator, output_type="np").images[0]


first = None
for title, selection in SELECTIONS.items():
    with pipe.enable_layerwise_offload(**selection) as handle:  # at the end the stock pipeline is back
        pixels = paint()
        report = handle.report().to_dict()
    first = pixels if first is None else first
    same = "the same picture" if np.array_equal(pixels, first) else "ANOTHER PICTURE: please report this"
    print(f"{title}: weights took {report['peak_ever'] / 2**20:.2f} MiB of the device; {same}")
    for part in report["components"]:
        kept, streamed = part["resident_groups"], part["streamed_groups"]
        print(f"  {part['name']:16}{part['choice']:11}{kept:3} groups resident, {streamed:3} streamed")
