"""Traces without weights: against published figures of full-size models, and against real runs of small pipelines."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import factory
from diffusers_layerwise import live
from diffusers_layerwise.errors import LayerwiseOffloadError
from diffusers_layerwise.fake import FakeDevice, faked
from diffusers_layerwise.hardware import PRESETS
from diffusers_layerwise.headers import checkpoint_dtypes, dtype_of, read_header
from diffusers_layerwise.recorder import ENTRIES, trace_module, trace_pipeline
from diffusers_layerwise.rivals import leaf_of, streamed
from diffusers_layerwise.selection import role
from diffusers_layerwise.skeleton import from_pipeline
from diffusers_layerwise.trace import Trace
from planning_models import MODELS, inputs_of, on_meta

#: Traces of real pipelines take seconds each.
pytestmark = pytest.mark.slow

GIB = 2**30
QUICK = "flux sdxl wan_two_stage sd15_controlnet".split()
SLOW = "sd15 sd3 wan qwenimage ltx hunyuan_video cogvideox svd ltx2".split()
PIPELINES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


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
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes as they are: the simulated device's allocator doesn't round."""
    monkeypatch.setattr(live, "BLOCK", 1)


@pytest.mark.parametrize("name", [p for p in PIPELINES if p not in ("wan_two_stage", "sd15_controlnet")])
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


# ---------------------------------------------------------------------- rules
def test_a_trace_survives_json() -> None:
    trace = traced("flux")
    again = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert again == trace
    with pytest.raises(ValueError, match="version"):
        Trace.from_dict(trace.to_dict() | {"version": 0})


def test_a_loaded_pipeline_is_left_as_it_was() -> None:
    pipe = factory.CASES["flux"].build()
    modules = factory.modules_of(pipe)
    before = {n: [(id(p), p.device.type, p.data_ptr()) for p in m.parameters()] for n, m in modules.items()}
    device = FakeDevice()
    copy = from_pipeline(pipe, device)
    assert all(p.is_meta for m in factory.modules_of(copy).values() for p in m.parameters())
    assert {n: [(id(p), p.device.type, p.data_ptr()) for p in m.parameters()] for n, m in modules.items()} == before
    assert all(not m._forward_pre_hooks and "forward" not in m.__dict__ for c in modules.values() for m in c.modules())
    assert copy.scheduler is not pipe.scheduler


def test_a_pipeline_under_layerwise_offload_is_traced_like_a_plain_one() -> None:
    pipe = factory.CASES["flux"].build()
    pipe.enable_layerwise_offload("all", "memory", onload_device="cpu")
    device = FakeDevice()
    call = {**factory.CASES["flux"].call_kwargs(), **factory.generator_kwargs(pipe)}
    trace = trace_pipeline(from_pipeline(pipe, device), device, call, [])
    assert [(c.name, c.flops) for c in trace.components] == [(c.name, c.flops) for c in traced("flux").components]
    assert pipe.layerwise_offload is not None


class Odd(nn.Module):
    """Asks for something that shapes alone can't give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        raise RuntimeError("no such kernel")
        return y


def test_what_cannot_be_traced_is_said_and_not_raised() -> None:
    with torch.device("meta"):
        module = Odd()
    trace = trace_module(module, lambda m: m(torch.empty(2, 8, device="meta")), "odd")
    part = trace.component("odd")
    assert "no such kernel" in (part.error or "")
    assert "aten" in (part.error or "")
    assert "no such kernel" in (trace.error or "")
    assert part.weights == 8 * 8 * 4 + 8 * 4


def test_small_values_are_exact_and_others_read_as_zero() -> None:
    device = FakeDevice()
    with faked(device):
        steps = torch.tensor([3.0, 5.0]).to("meta")
        mask = torch.arange(6, device="meta") % 2 == 0
        large = torch.randn(4, 4, device="meta")
        steps[0] += 1
        assert steps.tolist() == [4.0, 5.0]
        assert steps[1].item() == 5.0
        assert mask.nonzero().flatten().tolist() == [0, 2, 4]
        assert torch.empty(6, 2, device="meta")[mask].shape == (3, 2)
        assert large.cpu().abs().sum() == 0
        assert torch.tensor([steps[0], 2.0]).tolist() == [4.0, 2.0]
        steps.copy_(large[0, :2])
        assert steps.tolist() == [0.0, 0.0]
    assert device.twins.of(steps) is None


def test_live_bytes_end_with_their_tensors_and_are_rounded() -> None:
    device = FakeDevice()
    with faked(device):
        a = torch.empty(100, device="meta")
        assert device.live.now == live.BLOCK
        b = a[:50] + 1
        view = b.view(5, 10)
        assert device.live.now == 2 * live.BLOCK
        del a, b
        assert device.live.now == live.BLOCK
        del view
        assert device.live.now == 0
        assert device.live.take_high() == 2 * live.BLOCK
        assert device.live.take_high() == 0


def test_attention_is_one_kernel_also_inside_of_multihead_attention() -> None:
    device = FakeDevice()
    with torch.device("meta"):
        module = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    with faked(device):
        x = torch.empty(2, 128, 64, device="meta")
        module(x, x, x, need_weights=False)
    assert device.cost.attention == 2 * 2 * 4 * 128 * 128 * (16 + 16)
    assert device.live.take_high() < 2 * 4 * 128 * 128 * 4 * 2


# ---------------------------------------------------------------------- headers
def test_headers_tell_dtypes_also_of_a_cut_file_and_of_shards(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}, tmp_path / "x-00001-of-00002.safetensors")
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "x-00002-of-00002.safetensors")
    index = {"weight_map": {"a.weight": "x-00001-of-00002.safetensors", "norm.weight": "x-00002-of-00002.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    whole = (tmp_path / "x-00001-of-00002.safetensors").read_bytes()
    (tmp_path / "x-00001-of-00002.safetensors").write_bytes(whole[: len(whole) - 32])
    dtypes = checkpoint_dtypes(tmp_path)
    assert dtypes == {"a.weight": torch.bfloat16, "norm.weight": torch.float32}
    assert dtype_of("model.norm.weight", dtypes) is torch.float32
    assert dtype_of("other.bias", {"a": torch.float16, "b": torch.float16, "c": torch.float32}) is torch.float16


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version https://git-lfs")
    with pytest.raises(ValueError, match="safetensors header"):
        read_header(path)


def test_errors_of_folders_name_what_is_missing(tmp_path: Path) -> None:
    from diffusers_layerwise.skeleton import read_index

    with pytest.raises(LayerwiseOffloadError, match=r"model_index\.json"):
        read_index(tmp_path)
