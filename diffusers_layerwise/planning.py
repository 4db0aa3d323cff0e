"""Plans a pipeline from its folder or itself: traces the call, chooses what becomes of each component, predicts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from . import auto
from .config import LayerwiseOffloadConfig, Mode, Residency, format_bytes, parse_bytes, read_mode
from .cost import Problem, component_spec, smallest_budget
from .hardware import Hardware, resolve
from .plan import Choice
from .predict import PredictedPlan, predict
from .profiles import Outline, find_profile
from .selection import Components, select
from .skeleton import pipeline_class, read_index
from .trace import Trace
from .tracing import read_dtype, trace_folder, trace_loaded

#: Without a budget, this share of the device's memory is left alone.
MARGIN = 0.05


def plan_layerwise_offload(
    pipe_or_folder: DiffusionPipeline | str | Path,
    *,
    memory_budget: int | str | None = None,
    host_memory_budget: int | str | None = None,
    hardware: Hardware | str | None = None,
    mode: str | Mode = "auto",
    components: Components = None,
    config: LayerwiseOffloadConfig | dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    vae_tiling: bool | None = None,
    **call_kwargs: Any,
) -> PredictedPlan:
    """Says what will fit and how fast it will be, with no device and no weights.

    The pipeline's own call is run on tensors without memory. Peaks count tensors as torch's allocator does; workspaces
    of kernels, fragmentation and the driver's context (some 0.3 to 0.6 GiB) come on top. Times are a roofline model of
    the hardware's rates and a simulation of the copies.

    Args:
        pipe_or_folder (`DiffusionPipeline`, `str` or `Path`): A loaded pipeline (it isn't touched), or a folder with
            `model_index.json` and the components' configs; weight files may be missing.
        memory_budget (`int` or `str`, *optional*): Device bytes for weights, ring and activations (`"8GiB"`). None:
            the hardware's memory less 5 %.
        host_memory_budget (`int` or `str`, *optional*): Bytes of host memory for weights (`"16GiB"`); what doesn't fit
            is read from its files. None: what `config` says in bytes, else no limit.
        hardware (`Hardware` or `str`, *optional*): The device, or the name of a preset (`"RTX 4090"`). None: the one
            that is here.
        mode, components, config: As for [`enable_layerwise_offload`].
        dtype (`torch.dtype` or `str`, *optional*): As `torch_dtype` of `from_pretrained`, for a folder. None: that of
            the files, else bfloat16.
        vae_tiling (`bool`, *optional*): Plan for a VAE whose tiling is on, where its activations are what takes most.
            Tiles change the image a little at their seams. None: only where the budget needs it, which the plan says.
        **call_kwargs: The call's arguments: `height`, `width`, `num_frames`, `num_inference_steps`, ...

    Returns:
        `PredictedPlan`

    Raises:
        TypeError, ValueError: Bad arguments.
        LayerwiseOffloadError: The folder is no pipeline.
        torch.OutOfMemoryError: The budget is below the smallest that works (which the message says).

    Example:
        >>> print(plan_layerwise_offload(pipe, memory_budget="8GiB", hardware="RTX 4070", height=1024, width=1024))
    """
    if vae_tiling not in (None, True, False):
        raise TypeError(f"vae_tiling must be True, False or None, got {vae_tiling!r}.")
    chosen_mode, options = read_mode(mode), LayerwiseOffloadConfig.read(config)
    budget = None if memory_budget is None else parse_bytes(memory_budget, "memory_budget")
    host = options.host_memory_budget if isinstance(options.host_memory_budget, int) else None
    host = host if host_memory_budget is None else parse_bytes(host_memory_budget, "host_memory_budget")
    notes: list[str] = []
    device = resolve(hardware, notes)
    declared, trace = _traced(pipe_or_folder, dtype, call_kwargs)
    problem = make_problem(trace, device, chosen_mode, components, options, notes)
    if chosen_mode is Mode.AUTO:
        found = find_profile(declared)
        notes.append(f"profile {found}")
        policy = auto.Policy(found, budget is not None, components is not None, free=device.memory)
        problem = dataclasses.replace(problem, policy=policy)
    total = int(device.memory * (1 - MARGIN)) if budget is None else budget
    tiled = tuple(trace.tiled) if vae_tiling is not False else ()
    untiled = smallest_budget(problem)[0] if tiled else 0
    if tiled and (vae_tiling or total < untiled):
        other = make_problem(trace.with_tiles(), device, chosen_mode, components, options, [])
        other = dataclasses.replace(other, policy=problem.policy)
        least = smallest_budget(other)[0]
        if vae_tiling or total >= least:
            plan = predict(other, total, [*notes, *_tiling_notes(trace, untiled)], host)
            return dataclasses.replace(plan, tiled=tiled)
        raise torch.OutOfMemoryError(
            f"A memory budget of {format_bytes(total)} is too small for this call. The smallest budget that works is "
            f"{least} bytes ({format_bytes(least)}) with pipe.{tiled[0]}.enable_tiling(), and "
            f"{format_bytes(untiled)} without. Pass memory_budget={least} or more, or a smaller "
            f"size or batch."
        )
    return predict(problem, total, notes, host)


def _traced(
    pipe_or_folder: DiffusionPipeline | str | Path, dtype: torch.dtype | str | None, call: dict[str, Any]
) -> tuple[Any, Trace]:
    """What declares a profile, and the trace of the call."""
    if isinstance(pipe_or_folder, DiffusionPipeline):
        return pipe_or_folder, trace_loaded(pipe_or_folder, call)
    if isinstance(pipe_or_folder, (str, Path)):
        index = read_index(Path(pipe_or_folder))
        trace = trace_folder(Path(pipe_or_folder), read_dtype(dtype), call)
        return Outline(pipeline_class(index), index), trace
    raise TypeError(
        f"plan_layerwise_offload needs a DiffusionPipeline or a folder, got {type(pipe_or_folder).__name__}."
    )


def _tiling_notes(trace: Trace, untiled: int) -> list[str]:
    return [
        f"{name}: this is with pipe.{name}.enable_tiling(), to be called first, which changes the image a little where "
        f"tiles meet; activations take {format_bytes(tiles.peak)} instead of "
        f"{format_bytes(trace.component(name).activation_peak)}, without which the smallest budget is "
        f"{format_bytes(untiled)}"
        for name, tiles in trace.tiled.items()
    ]


def make_problem(
    trace: Trace,
    hardware: Hardware,
    mode: Mode,
    components: Components,
    options: LayerwiseOffloadConfig,
    notes: list[str],
) -> Problem:
    """Chooses what becomes of each component, as enabling would."""
    chosen = select(components, [c.name for c in trace.components], mode, options)
    specs = []
    for traced in trace.components:
        if not traced.units and not traced.fixed:
            continue
        choice, config, _ = chosen.get(traced.name, (Choice.OFFLOAD, options, False))
        if choice is Choice.SKIP:
            notes.append(
                f"{traced.name}: skipped as asked; it is counted as resident, where a skipped component has to be"
            )
            choice = Choice.RESIDENT
        specs.append(component_spec(traced, hardware, choice, config, traced.name not in chosen))
    residency = options.residency or Residency.USE
    return Problem(trace, tuple(specs), hardware, mode, residency, options.activation_reserve)
