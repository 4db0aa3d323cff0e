"""Traces of folders and loaded pipelines, kept on disk so that the next plan is made at once."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from . import cache
from .errors import nearest
from .fake import FakeDevice
from .headers import checkpoint_files, read_header
from .recorder import trace_pipeline
from .skeleton import from_folder, from_pipeline, pipeline_class, read_index
from .trace import VERSION, Tiles, Trace

PROMPT = "a photo of a cat on a table beside a window"


def read_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by name: `"bf16"`, `"bfloat16"`, `"torch.float16"`, ...

    Raises:
        ValueError: No such floating point dtype.
    """
    short = {"bf16": torch.bfloat16, "fp16": torch.float16, "half": torch.float16, "fp32": torch.float32}
    if value is None or isinstance(value, torch.dtype):
        return value
    name = str(value).strip().lower().removeprefix("torch.")
    found = short.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        valid = ["bfloat16", "float16", "float32", *short]
        raise ValueError(f"dtype must be one of {valid}, got {value!r}.{nearest(name, valid)}")
    return found


def trace_folder(folder: Path, dtype: torch.dtype | None, call: Mapping[str, Any]) -> Trace:
    """Traces a call of the pipeline in a folder.

    Raises:
        LayerwiseOffloadError: The folder is no pipeline.
        TypeError: The pipeline takes no such argument.
    """
    arguments = full_call(pipeline_class(read_index(folder)), call)
    key = cache.digest(_versions(), str(dtype), _folder_key(folder), _call_key(arguments))

    def build(device: FakeDevice, notes: list[str]) -> Any:
        return from_folder(folder, device, dtype, notes)

    return _traced(key, build, arguments)


def trace_loaded(pipe: DiffusionPipeline, call: Mapping[str, Any]) -> Trace:
    """Traces a call of a loaded pipeline, which is not touched.

    Raises:
        TypeError: The pipeline takes no such argument.
    """
    arguments = full_call(type(pipe), call)
    key = cache.digest(_versions(), type(pipe).__qualname__, _pipe_key(pipe), _call_key(arguments))
    return _traced(key, lambda device, _: from_pipeline(pipe, device), arguments)


def _traced(key: str, build: Any, arguments: dict[str, Any]) -> Trace:
    name = f"traces/{key}.json"
    stored = cache.read(name)
    if stored is not None:
        try:
            return Trace.from_dict(stored)
        except (ValueError, KeyError, TypeError, IndexError):
            pass  # of another version, or broken: made anew
    device = FakeDevice()
    notes: list[str] = []
    trace = trace_pipeline(build(device, notes), device, arguments, notes)
    _try_tiling(trace, build, arguments)
    if trace.error is None:
        cache.write(name, trace.to_dict())
    return trace


def _try_tiling(trace: Trace, build: Any, arguments: dict[str, Any]) -> None:
    """Where a VAE's activations are the largest: traces the call again with tiling, in as few steps as possible."""
    top = max(trace.components, key=lambda c: c.activation_peak, default=None)
    if top is None or not top.activation_peak or "vae" not in top.name or trace.error:
        return
    device = FakeDevice()
    pipe = build(device, [])
    tiling = getattr(getattr(pipe, top.name, None), "enable_tiling", None)
    if tiling is None:
        return
    tiling()
    few = {**arguments, "num_inference_steps": 2} if "num_inference_steps" in arguments else arguments
    again = trace_pipeline(pipe, device, few, [])
    tiled = again.component(top.name)
    if again.error is None and tiled.activation_peak < top.activation_peak:
        trace.tiled[top.name] = Tiles(tiled.activation_peak, tiled.flops)


def full_call(cls: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, with a prompt where one is needed.

    Raises:
        TypeError: The pipeline takes no such argument; the message has the nearest one.
    """
    parameters = inspect.signature(cls.__call__).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in call:
            if name not in parameters:
                raise TypeError(
                    f"{cls.__name__} takes no argument {name!r}.{nearest(name, parameters)} It takes "
                    f"{', '.join(list(parameters)[1:])}."
                )
    arguments = dict(call)
    if "prompt" in parameters and not any(name.startswith("prompt") for name in call):
        arguments["prompt"] = PROMPT
    steps = parameters.get("num_inference_steps")
    if steps is not None and isinstance(steps.default, int):
        arguments.setdefault("num_inference_steps", steps.default)
    return arguments


# ---------------------------------------------------------------------- keys
def _versions() -> list[str]:
    """Whatever a trace depends on beside the configs and the call."""
    try:
        own = importlib.metadata.version("diffusers-layerwise")
    except importlib.metadata.PackageNotFoundError:
        own = ""
    try:
        import transformers

        other = str(transformers.__version__)
    except ImportError:
        other = ""
    return [str(VERSION), own, str(torch.__version__), str(diffusers.__version__), other]


def _folder_key(folder: Path) -> list[Any]:
    """The content of every config, and the dtypes in the files' headers."""
    found: list[Any] = []
    for path in sorted(folder.glob("**/*.json")):
        if path.stat().st_size < 1 << 20 or ".safetensors.index" in path.name:
            found.append([str(path.relative_to(folder)), path.read_text(errors="replace")])
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        for path in checkpoint_files(place):
            found.append([place.name, path.name, {k: str(v) for k, v in read_header(path).items()}])
    return found


def _pipe_key(pipe: DiffusionPipeline) -> list[Any]:
    found: list[Any] = []
    for name, value in pipe.components.items():
        if isinstance(value, nn.Module):
            shapes = [(n, tuple(t.shape), str(t.dtype)) for n, t in value.state_dict().items()]
            told = (repr(getattr(value, "config", None)), repr(value), _settings(value))
            found.append([name, type(value).__qualname__, shapes, *told])
        else:
            found.append([name, type(value).__qualname__, repr(getattr(value, "config", None))])
    return found


def _settings(module: nn.Module) -> list[Any]:
    """What was switched on a module and its parts after they were made: tiling, slicing, attention processors."""
    plain = (bool, int, float, str, type(None))
    return [
        [path, name, value if isinstance(value, plain) else type(value).__qualname__]
        for path, part in module.named_modules()
        for name, value in sorted(part.__dict__.items())
        if not name.startswith("_")
    ]


def _call_key(arguments: Mapping[str, Any]) -> list[Any]:
    def key(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [list(value.shape), str(value.dtype)]
        if hasattr(value, "size") and hasattr(value, "mode"):
            return [type(value).__name__, value.size, value.mode]
        if isinstance(value, (list, tuple)):
            return [key(v) for v in value]
        if isinstance(value, torch.Generator):
            return "generator"
        return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__qualname__

    return [[name, key(value)] for name, value in sorted(arguments.items())]
