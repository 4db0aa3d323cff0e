"""A pipeline case (how to build, call and read one tiny pipeline), the table of all cases, and the runner."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import is_ftfy_available
from torch import nn

Build = Callable[[], DiffusionPipeline]
Output = Callable[[Any], torch.Tensor]

NOISE = 0.05
"""Spread of the noise that replaces constant parameters (norm weights, biases, zero-initialised projections)."""


@dataclass(frozen=True)
class PipelineCase:
    """One tiny pipeline: `build()` makes it, `call_kwargs()` calls it, `output()` reads the result."""

    name: str
    pipeline_class: str
    build: Build
    call_kwargs: Callable[[], dict[str, Any]]
    output: Output
    tags: frozenset[str]


CASES: dict[str, PipelineCase] = {}
"""Every case by name; filled by the family modules when the package is imported."""

NO_RELOAD = "no_reload"
"""Tag of the cases that diffusers can save but not load again."""

IDLE = "idle:"
"""Prefix of the tags that name components whose weights the call does not use."""

KNOWN_BROKEN: dict[str, str] = {}
"""Pipeline class -> why it does not run here even when fully resident; such classes have no case."""


def to_tensor(value: Any) -> torch.Tensor:
    """A tensor of whatever a pipeline returns: tensors, arrays, images, and (nested) lists of them."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple)):
        return torch.stack([to_tensor(item) for item in value])
    return torch.from_numpy(np.array(value))


def first_output(result: Any) -> torch.Tensor:
    """The first field of a pipeline output, the usual one."""
    return to_tensor(result[0])


def fields_output(*names: str) -> Output:
    """A reader of the named fields of a pipeline output, flattened and joined when there are several."""

    def read(result: Any) -> torch.Tensor:
        values = [to_tensor(getattr(result, name)) for name in names]
        return values[0] if len(values) == 1 else torch.cat([value.flatten() for value in values])

    return read


def enliven(module: nn.Module) -> None:
    """Give constant parameters and batch-norm statistics distinct values, so that each of them shows in the output."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            parameter.data.add_(torch.randn_like(parameter), alpha=NOISE)
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.running_mean is not None:
            child.running_mean.add_(torch.randn_like(child.running_mean), alpha=NOISE)
            spread = torch.rand_like(child.running_mean)
            child.get_buffer("running_var").mul_(1.0 + NOISE * spread)


def modules_of(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The components of a pipeline that hold weights."""
    return {name: item for name, item in pipe.components.items() if isinstance(item, nn.Module)}


def _finished(build: Build, pipeline_class: str) -> Build:
    """Wrap a builder: fixed seed, global random state left alone, eval mode, no progress bar."""

    def finished() -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = build()
            for module in modules_of(pipe).values():
                enliven(module.eval())
        if type(pipe).__name__ != pipeline_class:
            raise TypeError(f"the case promises {pipeline_class}, its builder returns {type(pipe).__name__}")
        pipe.set_progress_bar_config(disable=True)
        return pipe

    finished.__doc__ = build.__doc__
    return finished


def register(
    name: str,
    pipeline_class: str,
    call: Callable[[], Mapping[str, Any]],
    tags: str | Iterable[str] = (),
    output: Output = first_output,
) -> Callable[[Build], Build]:
    """Decorator that puts a builder into `CASES`; `call` makes fresh keyword arguments, without the generator."""
    tag_set = frozenset(tags.split() if isinstance(tags, str) else tags)

    def decorate(build: Build) -> Build:
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        CASES[name] = PipelineCase(
            name, pipeline_class, _finished(build, pipeline_class), lambda: dict(call()), output, tag_set
        )
        return build

    return decorate


def _spare_ftfy(cls: type[DiffusionPipeline]) -> None:
    """Several pipelines call ftfy without asking whether it is installed; where it is not, text stays as it is."""
    owner = sys.modules[cls.__module__]
    if not is_ftfy_available() and not hasattr(owner, "ftfy"):
        setattr(owner, "ftfy", SimpleNamespace(fix_text=str))  # noqa: B010


def pipeline(pipeline_class: str, **components: Any) -> DiffusionPipeline:
    """The named diffusers pipeline with these components; the others become None, without safety checker."""
    cls = getattr(diffusers, pipeline_class)
    _spare_ftfy(cls)
    required, _ = cls._get_signature_keys(cls)
    missing: dict[str, Any] = {key: None for key in (*required, *cls._optional_components) if key not in components}
    accepted = inspect.signature(cls.__init__).parameters
    missing["requires_safety_checker"] = False
    return cls(**components, **{key: value for key, value in missing.items() if key in accepted})


def shrink(module: str, function: str = "calculate_dimensions", factor: int = 64) -> None:
    """Divide the pixel count that pipelines of a diffusers module aim at, where it is fixed at about a million."""
    owner = importlib.import_module(f"diffusers.pipelines.{module}")
    original = getattr(owner, function)
    if not hasattr(original, "__wrapped__"):

        @functools.wraps(original)
        def smaller(target_area: int, ratio: float) -> Any:
            return original(target_area // factor, ratio)

        setattr(owner, function, smaller)


def fill(makers: Mapping[str, Callable[[], Any]], components: dict[str, Any]) -> dict[str, Any]:
    """The components given, and those that the makers make for the names that are missing."""
    return {name: make() for name, make in makers.items() if name not in components} | components


def add(
    name: str,
    pipeline_class: str,
    call: Callable[[], Mapping[str, Any]],
    tags: str,
    make: Callable[..., DiffusionPipeline],
    output: Output = first_output,
    **makers: Callable[[], Any],
) -> None:
    """Register a variant: `make(pipeline_class, **components)` with the components that the makers make."""

    def build() -> DiffusionPipeline:
        return make(pipeline_class, **{key: maker() for key, maker in makers.items()})

    register(name, pipeline_class, call, tags, output)(build)


def generator_kwargs(pipe: DiffusionPipeline, seed: int = 0) -> dict[str, Any]:
    """`{"generator": ...}` with a seeded CPU generator, or nothing where the pipeline takes none."""
    if "generator" not in inspect.signature(type(pipe).__call__).parameters:
        return {}
    return {"generator": torch.Generator("cpu").manual_seed(seed)}


def run(case: PipelineCase | str, pipe: DiffusionPipeline, seed: int = 0, **overrides: Any) -> torch.Tensor:
    """Call the pipeline as the case says and return the output tensor on the CPU; overrides win."""
    if isinstance(case, str):
        case = CASES[case]
    kwargs = {**case.call_kwargs(), **generator_kwargs(pipe, seed), **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = pipe(**kwargs)
    return case.output(result).detach().cpu()
