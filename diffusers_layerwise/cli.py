"""The command line: `diffusers-layerwise plan FOLDER ...`, `... doctor`, `... cache` and `... hardware`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from . import doctor, weight_cache
from . import hardware as devices
from .config import format_bytes
from .errors import LayerwiseOffloadError
from .planning import plan_layerwise_offload
from .predict import PlanPoint, PredictedPlan
from .rivals import Rival, rivals

#: Characters of the longest bar in a chart.
WIDTH = 48
#: Exit code for whatever the user can mend, and the shell's for what Ctrl-C ended.
BAD, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, or 2 with a message on stderr, or 130 after Ctrl-C.

    Args:
        arguments (`Sequence[str]`, *optional*): The command line without the program's name.
    """
    options = _parser().parse_args(arguments)
    try:
        text = options.run(options)
    except (LayerwiseOffloadError, torch.OutOfMemoryError, ValueError, TypeError, OSError, ImportError) as error:
        return _fail(str(error), BAD)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        pass  # whoever reads it, such as `head`, has seen enough
    except OSError as error:
        return _fail(f"the output can't be written: {error}", BAD)
    return 0


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        _write(sys.stderr, f"diffusers-layerwise: {message}")
    return code


def _write(stream: TextIO | None, text: str) -> None:
    """Writes a line in whatever encoding the stream has; what that can't say, such as a folder's name, is escaped."""
    if stream is None:  # closed by `>&-`: nobody wants it
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError:
        # What is still in its buffer would be tried again when Python ends, and reported as an error of its own.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diffusers-layerwise", description="What a diffusers pipeline takes when it is offloaded layer by layer."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="what fits and how fast it is, with no device and no weights")
    plan.set_defaults(run=run_plan)
    plan.add_argument("folder", help="a pipeline's folder, with model_index.json; weight files may be missing")
    plan.add_argument("--memory", metavar="SIZE", help="device memory to plan for, such as 8GiB")
    plan.add_argument("--host-memory", metavar="SIZE", help="host memory for weights; the rest is read from files")
    for name in ("height", "width", "num-frames", "steps", "batch"):
        plan.add_argument(f"--{name}", type=_count, metavar="N", help=_HELP[name])
    plan.add_argument("--dtype", help="dtype of the weights: bf16, fp16, fp32; by default that of the files")
    plan.add_argument(
        "--hardware", metavar="NAME", help=f"one of {', '.join(devices.PRESETS)}; by default what is here"
    )
    plan.add_argument("--mode", default="auto", help="auto, memory, speed or manual")
    plan.add_argument("--components", metavar="NAMES", help="what to stream, such as transformer,text_encoder")
    plan.add_argument(
        "--tiling", action=argparse.BooleanOptionalAction, help="with the VAE's tiling; by default where it is needed"
    )
    plan.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="another argument of the call")
    plan.add_argument("--compare", action="store_true", help="show the other ways to offload beside it")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--plot", metavar="FILE", help="draw budget against time (needs matplotlib)")
    kept = commands.add_parser("cache", help="converted weights that were kept: what is there, check it, remove it")
    kept.set_defaults(run=run_cache)
    kept.add_argument("action", nargs="?", default="list", choices=("list", "verify", "clear"), help="list by default")
    looked = commands.add_parser("doctor", help="what this machine says, and what would be chosen for a folder")
    looked.set_defaults(run=run_doctor)
    looked.add_argument("folder", nargs="?", help="a pipeline's folder, with model_index.json")
    looked.add_argument("--device", help="such as cuda; by default the accelerator, else the CPU")
    looked.add_argument("--quick", action="store_true", help="measure nothing")
    looked.add_argument("--json", action="store_true", help="print JSON")
    measured = commands.add_parser("hardware", help="measure this machine's device, and keep it for plans")
    measured.set_defaults(run=run_hardware)
    measured.add_argument("--device", help="such as cuda; by default the accelerator, else the CPU")
    measured.add_argument("--json", action="store_true", help="print JSON")
    return parser


_OWN = {
    "pipe_or_folder": "the folder is the first argument",
    "memory_budget": "use --memory",
    "hardware": "use --hardware",
    "mode": "use --mode",
    "components": "use --components",
    "config": "options of offloading can't be given here; use plan_layerwise_offload(config=...) in Python",
    "dtype": "use --dtype",
    "vae_tiling": "use --tiling or --no-tiling",
}
"""What `plan_layerwise_offload` takes itself, and so isn't an argument of the call."""

_HELP = {
    "height": "pixels",
    "width": "pixels",
    "num-frames": "frames of a video",
    "steps": "num_inference_steps of the call",
    "batch": "images or videos for each prompt",
}


def _count(text: str) -> int:
    # Python writes no integer of thousands of digits into a message, and takes none from a text.
    value = int(text) if text.strip().lstrip("+").isdecimal() and len(text) < 20 else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more, such as 20, got {text!r}")
    return value


def call_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The pipeline call's arguments that the options mean.

    Raises:
        ValueError: An `--arg` has no `=`.
    """
    names = {"height": "height", "width": "width", "num_frames": "num_frames", "steps": "num_inference_steps"}
    found: dict[str, Any] = {
        argument: getattr(options, option) for option, argument in names.items() if getattr(options, option) is not None
    }
    if options.batch is not None:
        found["num_videos_per_prompt" if options.num_frames else "num_images_per_prompt"] = options.batch
    for item in options.arg:
        name, separator, text = item.partition("=")
        if not separator or not name:
            raise ValueError(f"--arg needs NAME=VALUE, got {item!r}.")
        if name in found or name in _OWN:
            raise ValueError(f"--arg {item!r}: {_OWN.get(name, 'it is given by its own option already')}.")
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):  # nested too deeply for the parser
            found[name] = text
    return found


def run_plan(options: argparse.Namespace) -> str:
    """The `plan` command's output."""
    plan = plan_layerwise_offload(
        options.folder,
        memory_budget=options.memory,
        host_memory_budget=options.host_memory,
        hardware=options.hardware,
        mode=options.mode,
        components=options.components,
        dtype=options.dtype,
        vae_tiling=options.tiling,
        **call_arguments(options),
    )
    others = rivals(plan.problem) if options.compare and plan.problem is not None else []
    points = plan.sweep(plan.budgets())
    if options.plot:
        plot(points, others, Path(options.plot))
    if options.json:
        values = plan.to_dict() | {"sweep": [vars(point) for point in points]}
        return json.dumps(values | ({"compare": [vars(rival) for rival in others]} if others else {}), indent=2)
    parts = [str(plan), "", *chart(points)]
    return "\n".join([*parts, "", *comparison(plan, others)] if others else parts)


def chart(points: Sequence[PlanPoint]) -> list[str]:
    """Budget against the seconds of a call, as bars of text."""
    most = max((p.total_seconds for p in points), default=0.0) or 1.0
    lines = ["budget against seconds of a call"]
    for point in points:
        bar = "#" * max(1, round(WIDTH * point.total_seconds / most))
        lines.append(f"  {format_bytes(point.budget):>10}  {bar:<{WIDTH}}  {point.total_seconds:.2f} s")
    return lines


def comparison(plan: PredictedPlan, others: Sequence[Rival]) -> list[str]:
    """The other ways to offload beside the plan, as a table."""
    mine = Rival("this plan", plan.total_peak_bytes, plan.step_seconds or 0.0, plan.total_seconds)
    lines = [f"  {'':<28}  {'peak':>10}  {'a step':>10}  {'a call':>10}"]
    for rival in [mine, *others]:
        times = f"{rival.step_seconds:>8.3f} s  {rival.total_seconds:>8.2f} s"
        lines.append(f"  {rival.name:<28}  {format_bytes(rival.peak_bytes):>10}  {times}")
    return lines


def plot(points: Sequence[PlanPoint], others: Sequence[Rival], path: Path) -> None:
    """Draws budget against time.

    Raises:
        ImportError: matplotlib isn't there.
        ValueError: The path is a folder.
    """
    if path.is_dir():
        raise ValueError(f"--plot needs a file, such as {str(path / 'plan.png')!r}; {str(path)!r} is a folder.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"--plot needs matplotlib: pip install 'diffusers-layerwise[plot]' ({error}).") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([p.budget / 2**30 for p in points], [p.total_seconds for p in points], marker="o", label="this plan")
    for rival in others:
        axes.plot(rival.peak_bytes / 2**30, rival.total_seconds, marker="x", linestyle="none", label=rival.name)
    axes.set(xlabel="device memory (GiB)", ylabel="seconds of a call", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def run_cache(options: argparse.Namespace) -> str:
    """The `cache` command's output."""
    if options.action == "clear":
        return f"removed {format_bytes(weight_cache.clear())} from {weight_cache.root()}"
    if options.action == "verify":
        broken = weight_cache.verify()
        return "\n".join([*(f"removed, not what was written: {name}" for name in broken), *_cached()])
    return "\n".join(_cached())


def _cached() -> list[str]:
    found = weight_cache.entries()
    total = format_bytes(sum(entry.nbytes for entry in found))
    return [f"{weight_cache.root()}: {total} of converted weights", *(f"  {entry}" for entry in found)]


def run_doctor(options: argparse.Namespace) -> str:
    """The `doctor` command's output."""
    found = doctor.examine(options.folder, options.device, 0 if options.quick else doctor.SECONDS)
    return json.dumps(found.to_dict(), indent=2) if options.json else str(found)


def run_hardware(options: argparse.Namespace) -> str:
    """The `hardware` command's output."""
    try:
        measured = devices.measure(options.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {options.device!r} can't be measured: {error}") from error
    place = devices.store(measured)
    if options.json:
        return json.dumps(measured.to_dict(), indent=2)
    kept = f"kept in {place}" if place is not None else "not kept: the cache folder can't be written to"
    return f"{measured}\n  {kept}"
