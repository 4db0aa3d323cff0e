"""Runs a diffusers checkpoint resident and then layer by layer, and checks that both give the same image.

Usage:
    python examples/quickstart.py                # makes a small Flux checkpoint first; needs no network and no GPU
    python examples/quickstart.py ~/models/FLUX.1-dev --mode auto --memory-budget 8GiB
"""

from __future__ import annotations

import argparse
import inspect
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from tiny_checkpoint import make_checkpoint

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a folder; without one, a small checkpoint is made")
    parser.add_argument("--prompt", default="a photo of a red fox sitting in fresh snow, soft morning light")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--height", type=int, help="default: 256 for the small checkpoint, else the pipeline's own")
    parser.add_argument("--width", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="memory", choices=["auto", "memory", "speed", "manual"])
    parser.add_argument("--memory-budget", help="device memory the pipeline may use, such as 8GiB")
    parser.add_argument("--device", help="default: the accelerator if there is one, else the CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, default=Path("quickstart.png"))
    args = parser.parse_args()
    if args.checkpoint is None:
        args.checkpoint = make_checkpoint()
        args.height, args.width = args.height or 256, args.width or 256
    return args


def best_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def paint(pipe: DiffusionPipeline, args: argparse.Namespace) -> tuple[np.ndarray, float]:
    """One call with a fresh generator: the pixels, and the seconds it took."""
    wanted: dict[str, Any] = {
        "prompt": args.prompt,
        "height": args.height,
        "width": args.width,
        "num_inference_steps": args.steps,
        "generator": torch.Generator("cpu").manual_seed(args.seed),
        "output_type": "np",
    }
    accepted = inspect.signature(pipe.__call__).parameters
    begin = time.perf_counter()
    output = pipe(**{name: value for name, value in wanted.items() if name in accepted and value is not None})
    seconds = time.perf_counter() - begin
    return np.asarray(output[0]), seconds


def paint_resident(pipe: DiffusionPipeline, device: torch.device, args: argparse.Namespace) -> np.ndarray | None:
    """The image of the stock pipeline with everything on the device, or None where that does not fit."""
    try:
        pipe.to(device)
        pixels, seconds = paint(pipe, args)
    except torch.OutOfMemoryError:
        pipe.to("cpu")
        print(f"resident    does not fit on {device}: nothing to compare with")
        return None
    print(f"resident    {seconds:.2f} s on {device}")
    return pixels


def save_png(pixels: np.ndarray, path: Path) -> None:
    first = pixels.reshape(-1, *pixels.shape[-3:])[0]  # the first image, or the first frame of a video
    Image.fromarray((first * 255).round().astype(np.uint8).squeeze()).save(path)


def main() -> None:
    args = parse_args()
    device = torch.device(args.device) if args.device else best_device()
    print(f"checkpoint  {args.checkpoint}")
    pipe = DiffusionPipeline.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    expected = paint_resident(pipe, device, args)

    handle = pipe.enable_layerwise_offload(mode=args.mode, memory_budget=args.memory_budget, onload_device=device)

    first, first_seconds = paint(pipe, args)  # learns in which order the layers run
    second, second_seconds = paint(pipe, args)
    print(f"layerwise   {first_seconds:.2f} s the first time, {second_seconds:.2f} s the second, mode {args.mode}")
    save_png(second, args.out)
    print(f"image       {args.out}")

    for pixels in (first, second):
        if expected is not None and not np.array_equal(pixels, expected):
            raise SystemExit("The layerwise image differs from the resident one: please report this.")
    if expected is not None:
        print("identical   both layerwise images equal the resident one bit for bit")

    print(handle.report())
    report = handle.report().to_dict()
    peak, weights = report["peak_ever"], report["weights"]
    if args.mode == "memory" and peak >= weights:
        raise SystemExit(f"Weights took {peak} bytes of the device at once, no less than all {weights} of them.")


if __name__ == "__main__":
    main()
