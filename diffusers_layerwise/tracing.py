"""Traces of folders and loaded pipelines, kept on disk so that the next plan is made at once."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from . import cache
from .errors import nearest
from .fake import FakeDevice
from .headers import checkpoint_files, read_header
from .recorder import trace_pipeline
from .skeleton import from_folder, from_pipeline, pipeline_class, read_index
from .trace import VERSION, Tiles, Trace

#: How like an argument's name another one must be (`difflib`) to be a misspelling of it; `callback`, which old calls
#: give, is 0.57 like `callback_on_step_end`.
NEAR = 0.8
#: Arguments of calls that are sizes or numbers of things.
COUNTS = ("height", "width", "num_frames", "num_inference_steps", "num_images_per_prompt", "num_videos_per_prompt")
#: Packages whose code changes with their versions alone.
PUBLISHED = {"builtins", "collections", "diffusers", "tokenizers", "torch", "transformers", "typing", "abc"}
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
    kind = pipeline_class(read_index(folder))
    arguments = full_call(kind, call)
    told = _call_key(arguments)
    key = None if told is None else cache.digest(_versions(), str(dtype), _folder_key(folder), told)

    def build(device: FakeDevice, notes: list[str]) -> Any:
        return from_folder(folder, device, dtype, notes)

    return _traced(key, kind, build, arguments)


def trace_loaded(pipe: DiffusionPipeline, call: Mapping[str, Any]) -> Trace:
    """Traces a call of a loaded pipeline, which is not touched.

    Raises:
        TypeError: The pipeline takes no such argument.
    """
    arguments = full_call(type(pipe), call)
    code, told = _code_key(pipe), _call_key(arguments)
    parts = (_versions(), type(pipe).__qualname__, code, _pipe_key(pipe), told)
    key = None if code is None or told is None else cache.digest(*parts)
    return _traced(key, type(pipe), lambda device, _: from_pipeline(pipe, device), arguments)


@torch.inference_mode(False)
def _traced(key: str | None, kind: type, build: Any, arguments: dict[str, Any]) -> Trace:
    """The trace that was kept, or a new one; one without a key isn't kept."""
    name = f"traces/{key}.json"
    stored = None if key is None else cache.read(name)
    if isinstance(stored, dict):
        try:
            return Trace.from_dict(stored)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            pass  # of another version, or broken: made anew
    device = FakeDevice()
    notes: list[str] = []
    trace = trace_pipeline(build(device, notes), device, arguments, notes)
    pictured = {} if trace.error is None or trace.steps else pictures_for(kind, arguments)
    if pictured:
        device, notes = FakeDevice(), [f"{', '.join(pictured)}: stand-ins of the call's size"]
        again = trace_pipeline(build(device, notes), device, arguments | pictured, notes)
        trace, arguments = (again, arguments | pictured) if again.error is None else (trace, arguments)
    _try_tiling(trace, build, arguments)
    if trace.error is None and key is not None:
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
    try:
        tiling()
    except NotImplementedError:  # every autoencoder of diffusers has the method; some raise in it
        return
    few = {**arguments, "num_inference_steps": 2} if "num_inference_steps" in arguments else arguments
    again = trace_pipeline(pipe, device, few, [])
    tiled = again.component(top.name)
    if again.error is None and tiled.activation_peak < top.activation_peak:
        trace.tiled[top.name] = Tiles(tiled.activation_peak, tiled.flops)


def pictures_for(kind: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Blank pictures for a call that has none, where the pipeline takes some: of the call's size, else 512 pixels."""
    parameters = inspect.signature(kind.__call__).parameters
    size = (arguments.get("width") or 512, arguments.get("height") or 512)
    blank = Image.new("RGB", size)
    kinds: dict[str, Any] = dict.fromkeys(("image", "mask_image", "control_image"), blank)
    kinds["video"] = [blank] * (arguments.get("num_frames") or 9)
    if "video" in parameters and "image" in parameters:
        del kinds["video"]  # either will do
    return {name: value for name, value in kinds.items() if name in parameters and arguments.get(name) is None}


def full_call(cls: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments, with a prompt where one is needed.

    Raises:
        TypeError: The pipeline takes no such argument; the message has the nearest one.
        ValueError: A size or a number of steps, frames or images isn't 1 or more.
    """
    parameters = inspect.signature(cls.__call__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in call:
        # Those that take any ignore what they don't know: a misspelt size would be planned at its default.
        if name not in parameters and (not takes_any or get_close_matches(name, parameters, cutoff=NEAR)):
            raise TypeError(
                f"{cls.__name__} takes no argument {name!r}.{nearest(name, parameters)} It takes "
                f"{', '.join(list(parameters)[1:])}."
            )
    for name in COUNTS:
        value = call.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be an int of 1 or more, got {value!r}.")
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


def _code_key(pipe: DiffusionPipeline) -> list[str] | None:
    """The code of the user's own classes, which may change between runs; None where it can't be read."""
    values = [pipe, *pipe.components.values()]
    parts = [part for value in values if isinstance(value, nn.Module) for part in value.modules()]
    kinds = {kind for value in [*values, *parts] for kind in type(value).__mro__}
    own = sorted((k for k in kinds if k.__module__.partition(".")[0] not in PUBLISHED), key=lambda k: k.__qualname__)
    try:
        # The source of one of two classes of a name in a file is that of the first; their code differs.
        return [inspect.getsource(kind) + repr(_code_of(kind)) for kind in own]
    except (OSError, TypeError):
        return None


def _code_of(kind: type) -> list[Any]:
    functions = [(name, value) for name, value in sorted(vars(kind).items()) if inspect.isfunction(value)]
    return [
        (name, f.__code__.co_code, f.__code__.co_names, [c for c in f.__code__.co_consts if not inspect.iscode(c)])
        for name, f in functions
    ]


def _settings(module: nn.Module) -> list[Any]:
    """What was switched on a module and its parts after they were made: tiling, slicing, attention processors."""
    plain = (bool, int, float, str, type(None))
    return [
        [path, name, value if isinstance(value, plain) else type(value).__qualname__]
        for path, part in module.named_modules()
        for name, value in sorted(part.__dict__.items())
        if not name.startswith("_")
    ]


def _call_key(arguments: Mapping[str, Any]) -> list[Any] | None:
    def key(value: Any) -> Any:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return [type(value).__name__, list(value.shape), str(value.dtype)]
        if hasattr(value, "size") and hasattr(value, "mode"):
            return [type(value).__name__, value.size, value.mode]
        if isinstance(value, (list, tuple)):
            return [key(v) for v in value]
        if isinstance(value, Mapping):
            return [[str(name), key(v)] for name, v in value.items()]
        if isinstance(value, torch.Generator):
            return "generator"
        if isinstance(value, (torch.dtype, torch.device)):
            return str(value)
        if isinstance(value, (str, int, float, bool, type(None))):
            return value
        raise _NoKey

    try:
        return [[name, key(value)] for name, value in sorted(arguments.items())]
    except _NoKey:
        return None


class _NoKey(Exception):
    """A value that says too little of itself: what depends on it isn't kept."""
