"""Traces without weights: against published figures of full-size models, and against real runs of small pipelines."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planning_models import MODELS, inputs_of, on_meta
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import factory
from diffusers_layerwise import live
from diffusers_layerwise.errors import LayerwiseOffloadError
from diffusers_layerwise.fake import FakeDevice, faked
from diffusers_layerwise.headers import checkpoint_dtypes, dtype_of, read_header
from diffusers_layerwise.hardware import PRESETS
from diffusers_layerwise.recorder import ENTRIES, trace_module, trace_pipeline
from diffusers_layerwise.rivals import leaf_of, streamed
from diffusers_layerwise.selection import role
from diffusers_layerwise.skeleton import from_pipeline
from diffusers_layerwise.trace import Trace

GIB = 2**30
PIPELINES = "flux sd15 sdxl sd3 wan wan_two_stage ltx hunyuan_video cogvideox sd15_controlnet svd ltx2".split()
#: Pipelines whose component call keys make passes repeat; what a real run does is compared use by use.


# ---------------------------------------------------------------------- published figures
@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_public_models_are_exact(name: str) -> None:
    assert sum(p.numel() for p in on_meta(name).parameters()) == MODELS[name].parameters


@functools.cache
def public_trace(name: str) -> Trace:
    """The benchmark's forward pass, traced."""
    inputs = inputs_of(name)
    return trace_module(on_meta(name), lambda module: module(**inputs))


@pytest.mark.parametrize(
    ("name", "low", "high", "tolerance"),
    [("FLUX.1-dev", 22.61, 22.64, 0.005), ("LTX 0.9.7 13B", 25.21, 25.22, 0.005), ("SDXL UNet", 5.05, 5.05, 0.03)],
)
def test_resident_peak_is_what_was_published(name: str, low: float, high: float, tolerance: float) -> None:
    """`max_memory_allocated` of diffusers' benchmarks, in GiB."""
    trace = public_trace(name)
    assert trace.error is None
    part = trace.components[0]
    peak = (part.weights + part.activation_peak) / GIB
    assert low * (1 - tolerance) <= peak <= high * (1 + tolerance)


@pytest.mark.parametrize(("name", "low", "high"), [("FLUX.1-dev", 0.53, 0.56), ("LTX 0.9.7 13B", 1.04, 1.05)])
def test_peak_of_leaf_level_group_offload_is_what_was_published(name: str, low: float, high: float) -> None:
    part = public_trace(name).components[0]
    _, peak = streamed(leaf_of)(part, part.passes[0], PRESETS["A100"])
    assert low * 0.95 <= peak / GIB <= high * 1.05


@pytest.mark.parametrize(("name", "teraflops"), [("FLUX.1-dev", 74.395), ("LTX 0.9.7 13B", 212.03)])
def test_flops_are_what_was_published(name: str, teraflops: float) -> None:
    """The published figures count a multiply and an add as two operations."""
    assert public_trace(name).components[0].flops / 1e12 == pytest.approx(teraflops, rel=0.001)


# ---------------------------------------------------------------------- against real runs
@functools.cache
def traced(name: str) -> Trace:
    """A small pipeline's call, traced from the loaded pipeline."""
    case = factory.CASES[name]
    pipe = case.build()
    device = FakeDevice()
    call = {**case.call_kwargs(), **factory.generator_kwargs(pipe)}
    return trace_pipeline(from_pipeline(pipe, device), device, call, [])


def watch(pipe: Any, trace: Trace) -> dict[str, list[str]]:
    """Notes the modules with weights that each component uses in a real run, in order."""
    seen: dict[str, list[str]] = {}
    for part in trace.components:
        module = getattr(pipe, part.name)
        seen[part.name] = []
        for leaf in part.leaves:
            owner = module.get_submodule(leaf.name)

            def note(_m: nn.Module, _a: Any, uses: list[str] = seen[part.name], name: str = leaf.name) -> None:
                uses.append(name)

            if owner is not module:
                owner.register_forward_pre_hook(note)
    return seen


def counted(pipe: Any, names: list[str]) -> dict[str, int]:
    """Counts the FLOPs of components in a real run, by torch's own counter."""
    flops = dict.fromkeys(names, 0)
    for name in names:
        module = getattr(pipe, name)
        for entry in ENTRIES:
            method = getattr(module, entry, None)
            if method is None or not hasattr(type(module), entry):
                continue

            def run(*args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
                with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                    result = method(*args, **kwargs)
                flops[name] += counter.get_total_flops()
                return result

            module.__dict__[entry] = functools.wraps(method)(run)
    return flops


@pytest.mark.parametrize("name", PIPELINES)
def test_uses_and_their_order_are_those_of_a_real_run(name: str) -> None:
    trace = traced(name)
    assert trace.error is None
    pipe = factory.CASES[name].build()
    seen = watch(pipe, trace)
    factory.run(name, pipe)
    for part in trace.components:
        found = [
            part.leaves[use.leaf].name
            for component, kind in trace.sequence
            if component == part.name
            for use in part.passes[kind].uses
        ]
        assert [n for n in found if n] == seen[part.name], part.name


@pytest.mark.parametrize("name", PIPELINES)
def test_flops_of_denoisers_and_vaes_are_those_of_a_real_run(name: str) -> None:
    """Not of text encoders: torch's counter takes causal attention for full."""
    trace = traced(name)
    names = [c.name for c in trace.components if role(c.name) in ("dit", "vae")]
    pipe = factory.CASES[name].build()
    flops = counted(pipe, names)
    factory.run(name, pipe)
    assert {c: trace.component(c).flops for c in names} == flops


ATTENTION, RMS_NORM = F.scaled_dot_product_attention, F.rms_norm


def fused(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention whose memory on the device is its output, as fused kernels have it."""

    def host(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    result = ATTENTION(query.cpu(), *map(host, args), **{k: host(v) for k, v in kwargs.items()})
    if result.dim() != 4:
        return result.to(query.device)
    return result.transpose(1, 2).contiguous().to(query.device).transpose(1, 2)


def fused_norm(
    x: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """RMS norm likewise."""
    return RMS_NORM(x.cpu(), shape, None if weight is None else weight.cpu(), eps).to(x.device)


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bytes as they are: the simulated device's allocator doesn't round."""
    monkeypatch.setattr(live, "BLOCK", 1)
    yield


@pytest.mark.parametrize("name", ["flux", "sd15", "sd3", "wan", "ltx", "hunyuan_video", "cogvideox", "sdxl"])
def test_activation_peak_is_that_of_the_simulated_device(
    name: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, unrounded: None
) -> None:
    """Of the denoiser, within 2 %."""
    trace = traced.__wrapped__(name)
    case = factory.CASES[name]
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(F, "rms_norm", fused_norm)
    pipe = case.build().to("sim")
    part = next(c for c in trace.components if role(c.name) == "dit")
    module = getattr(pipe, part.name)
    weights = sim.mem(0)["allocated"]
    peaks: list[int] = []
    module.register_forward_pre_hook(lambda *_: sim.reset_peak_memory_stats())
    module.register_forward_hook(lambda *_: peaks.append(sim.mem(0)["peak"]))
    factory.run(name, pipe)
    print(name, part.activation_peak, max(peaks) - weights)
    assert part.activation_peak == pytest.approx(max(peaks) - weights, rel=0.02)
