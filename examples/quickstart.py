"""Runs a diffusers checkpoint resident and then layer by layer, and checks that both give the same pictures.

Usage:
    python examples/quickstart.py                # the small model in examples/digits; needs no network and no GPU
    python examples/quickstart.py --prompt "a red seven"
    python examples/quickstart.py --flux         # makes a larger checkpoint, Flux with random weights: paints noise
    python examples/quickstart.py ~/models/FLUX.1-dev --mode auto --memory-budget 7GiB
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
from PIL import Image, ImageDraw

import diffusers_layerwise  # noqa: F401  (gives every pipeline `enable_layerwise_offload`)
from diffusers_layerwise.config import parse_bytes

DIGITS = Path(__file__).parent / "digits"
TEN = "a zero,a red one,a green two,a three,a blue four,a five,a red six,a green seven,a eight,a blue nine".split(",")
FOX = ["a photo of a red fox sitting in fresh snow, soft morning light"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a folder (default: the digits that come with this)")
    parser.add_argument("--flux", action="store_true", help="make a Flux checkpoint with random weights, and run that")
    parser.add_argument("--prompt", nargs="+", help="one or more; default: ten digits, or a fox")
    parser.add_argument("--steps", type=int, help="default: 15 for the digits, else 4")
    parser.add_argument("--height", type=int, help="default: 256 for --flux, else the pipeline's own")
    parser.add_argument("--width", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="memory", choices=["auto", "memory", "speed"])
    parser.add_argument("--memory-budget", help="device memory the pipeline may use, such as 7GiB")
    parser.add_argument("--device", help="default: the accelerator if there is one, else the CPU")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--out", type=Path, default=Path("quickstart.png"))
    args = parser.parse_args()
    if args.flux and args.checkpoint:
        parser.error("--flux makes a checkpoint of its own: give a folder or --flux")
    check(parser, args)
    if args.flux:
        from tiny_checkpoint import make_checkpoint

        args.checkpoint = str(make_checkpoint())
        args.height, args.width = args.height or 256, args.width or 256
    digits = args.checkpoint is None
    args.checkpoint = args.checkpoint or str(DIGITS)
    args.prompt = args.prompt or (TEN if digits else FOX)
    args.steps = args.steps or (15 if digits else 4)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Says what is wrong with the arguments before anything is loaded, such as its device or its budget."""
    if args.checkpoint is not None and not (Path(args.checkpoint) / "model_index.json").is_file():
        parser.error(
            f"{args.checkpoint} has no model_index.json: expected a folder of a diffusers pipeline; download one "
            f"first: hf download black-forest-labs/FLUX.1-dev --local-dir FLUX.1-dev"
        )
    try:
        torch.empty(0, device=args.device or "cpu")
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device} can't be used here: {str(error).splitlines()[0]}")
    if args.memory_budget is not None:
        try:
            parse_bytes(args.memory_budget, "--memory-budget")
        except ValueError as error:
            parser.error(str(error))


def best_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def paint(pipe: DiffusionPipeline, args: argparse.Namespace) -> tuple[np.ndarray, float]:
    """One call with fresh generators: the pixels, and the seconds it took."""
    generators = [torch.Generator("cpu").manual_seed(args.seed + i) for i in range(len(args.prompt))]
    one = len(args.prompt) == 1
    wanted: dict[str, Any] = {
        "prompt": args.prompt[0] if one else args.prompt,
        "height": args.height,
        "width": args.width,
        "num_inference_steps": args.steps,
        "generator": generators[0] if one else generators,
        "output_type": "np",
    }
    accepted = inspect.signature(pipe.__call__).parameters
    begin = time.perf_counter()
    output = pipe(**{name: value for name, value in wanted.items() if name in accepted and value is not None})
    seconds = time.perf_counter() - begin
    return np.asarray(output[0]), seconds


def paint_resident(pipe: DiffusionPipeline, device: torch.device, args: argparse.Namespace) -> np.ndarray | None:
    """The pictures of the stock pipeline with everything on the device, or None where that does not fit."""
    try:
        pipe.to(device)
        pixels, seconds = paint(pipe, args)
    except torch.OutOfMemoryError:
        pipe.to("cpu")
        print(f"resident    does not fit on {device}: nothing to compare with")
        return None
    print(f"resident    {seconds:.2f} s on {device}")
    return pixels


def save_png(rows: dict[str, np.ndarray], path: Path) -> None:
    """A row of pictures for each caption, one above the other."""
    parts = []
    for caption, pixels in rows.items():
        if pixels.ndim == 5:
            pixels = pixels[:, 0]  # the first frame of each video
        strip = Image.fromarray((np.concatenate(pixels, axis=1) * 255).round().astype(np.uint8).squeeze())
        if strip.height < 96:
            strip = strip.resize((strip.width * 3, strip.height * 3), Image.Resampling.BICUBIC)
        parts.append((caption, strip))
    sheet = Image.new("RGB", (parts[0][1].width, sum(strip.height + 20 for _, strip in parts)), "white")
    top = 0
    for caption, strip in parts:
        ImageDraw.Draw(sheet).text((6, top + 4), caption, fill="black")
        sheet.paste(strip, (0, top + 20))
        top += strip.height + 20
    sheet.save(path)


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
    rows = {} if expected is None else {"resident": expected}
    save_png(rows | {"layer by layer": second}, args.out)
    print(f"pictures    {args.out}: {', '.join(args.prompt)}")

    for pixels in (first, second):
        if expected is not None and not np.array_equal(pixels, expected):
            raise SystemExit("A layerwise picture differs from the resident one: please report this.")
    if expected is not None:
        print("identical   what both layerwise calls painted equals the resident pictures bit for bit")

    print(handle.report())
    report = handle.report().to_dict()
    peak, weights = report["peak_ever"], report["weights"]
    if args.mode == "memory" and peak >= weights:
        raise SystemExit(f"Weights took {peak} bytes of the device at once, no less than all {weights} of them.")


if __name__ == "__main__":
    main()
