"""diffusers' caches and switches of models beside ours: before enabling and after it, and taken off in both orders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    LayerSkipConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import HookRegistry, apply_layer_skip
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

import diffusers_layerwise  # noqa: F401
import factory
from compatibility import Cell

TABLE = "Caches and switches of models"
STEPS = 6
SLOW = pytest.mark.slow
MODES = ["memory", "auto"]
IN_MODES = pytest.mark.parametrize("mode", ["memory", pytest.param("auto", marks=SLOW)])
Switch = Callable[[DiffusionPipeline], Any]


def first_block(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))


def taylor(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, taylor_factors_dtype=torch.float32)
    )


def taylor_lite(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=2, use_lite_mode=True)
    )


def mag(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        MagCacheConfig(threshold=0.5, max_skip_steps=1, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS)
    )


def faster(pipe: DiffusionPipeline) -> None:
    distilled = "Flux" in type(pipe).__name__
    pipe.transformer.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 900),
            unconditional_batch_skip_range=2,
            unconditional_batch_timestep_skip_range=(-1, 900),
            current_timestep_callback=lambda: pipe.current_timestep,
            tensor_format="BFCHW",
            is_guidance_distilled=distilled,
        )
    )


def pyramid(pipe: DiffusionPipeline) -> None:
    pipe.transformer.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(0, 950),
            current_timestep_callback=lambda: pipe.current_timestep,
        )
    )


def layer_skip(pipe: DiffusionPipeline) -> None:
    apply_layer_skip(pipe.transformer, LayerSkipConfig([1, 2], fqn="blocks"))


def feed_forward_skip(pipe: DiffusionPipeline) -> None:
    apply_layer_skip(pipe.transformer, LayerSkipConfig([1, 2], fqn="transformer_blocks", skip_attention=False))


def cache_off(pipe: DiffusionPipeline) -> None:
    pipe.transformer.disable_cache()


def skip_off(pipe: DiffusionPipeline) -> None:
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).remove_hook("layer_skip_hook", recurse=True)


def freeu(pipe: DiffusionPipeline) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


def fuse(pipe: DiffusionPipeline) -> None:
    pipe.transformer.fuse_qkv_projections()


#: A pipeline, what is put on, and what takes it off.
SWITCHES: dict[str, tuple[str, Switch, Switch]] = {
    "`FirstBlockCacheConfig`": ("flux", first_block, cache_off),
    "`FirstBlockCacheConfig`, Wan": ("wan", first_block, cache_off),
    "`TaylorSeerCacheConfig`": ("flux", taylor, cache_off),
    "`TaylorSeerCacheConfig`, lite": ("flux", taylor_lite, cache_off),
    "`MagCacheConfig`": ("flux", mag, cache_off),
    "`FasterCacheConfig`": ("flux", faster, cache_off),
    "`FasterCacheConfig`, CogVideoX": ("cogvideox", faster, cache_off),
    "`PyramidAttentionBroadcastConfig`": ("flux", pyramid, cache_off),
    "`LayerSkipConfig`, Wan": ("wan", layer_skip, skip_off),
    "`LayerSkipConfig`, feed-forward": ("flux", feed_forward_skip, skip_off),
    "`enable_freeu()`, SD 1.5": ("sd15", freeu, lambda pipe: pipe.disable_freeu()),
    "`enable_freeu()`, SDXL": ("sdxl", freeu, lambda pipe: pipe.disable_freeu()),
    "`fuse_qkv_projections()`": ("flux", fuse, lambda pipe: pipe.transformer.unfuse_qkv_projections()),
}
QUICK = ("`FirstBlockCacheConfig`", "`LayerSkipConfig`, Wan", "`enable_freeu()`, SD 1.5")
#: The denoiser streams under it, and a part of it is resident.
BUDGETS = {"flux": 400_000, "wan": 145_000, "cogvideox": 200_000, "sd15": 400_000, "sdxl": 900_000, "sd3": 400_000}


def run(case: str, pipe: DiffusionPipeline, seed: int = 0, **options: Any) -> torch.Tensor:
    return factory.run(case, pipe, seed, num_inference_steps=STEPS, **options)


def enable(case: str, pipe: DiffusionPipeline, mode: str, activation_reserve: int | None = 0) -> Any:
    config = {"activation_reserve": activation_reserve}
    limit: dict[str, Any] = {"memory_budget": BUDGETS[case], "config": config} if mode == "auto" else {}
    return pipe.enable_layerwise_offload(mode=mode, onload_device="sim", **limit)


def cases() -> list[Any]:
    """Every switch in each mode and order; the quick ones by default."""
    found = []
    for name in SWITCHES:
        for mode in MODES:
            for when in ("before", "after", "after a call"):
                is_quick = (mode == "memory" and when != "after a call") or (name in QUICK and when == "after a call")
                found.append(pytest.param(name, mode, when, marks=() if is_quick else SLOW))
    return found


@pytest.mark.parametrize(("name", "mode", "when"), cases())
def test_put_on_and_taken_off_in_either_order(name: str, mode: str, when: str, sim: ModuleType, cell: Cell) -> None:
    case, on, off = SWITCHES[name]
    cell(TABLE, name, f"{mode}, {'before' if when == 'before' else 'after'} ours")
    reference, pipe = factory.CASES[case].build(), factory.CASES[case].build()
    plain = run(case, reference)
    on(reference)
    switched = [run(case, reference, seed) for seed in (0, 1)]
    assert not torch.equal(switched[0], plain) or "fuse" in name, "it makes no difference here"
    if when == "before":
        on(pipe)
    handle = enable(case, pipe, mode)
    if when != "before":
        if when == "after a call":
            assert torch.equal(run(case, pipe), plain)
        on(pipe)
    for seed in (0, 1):
        assert torch.equal(run(case, pipe, seed), switched[seed])
    assert handle.report().peak_seen <= handle.plan.peak_bytes
    assert handle.report().peak_ever <= BUDGETS[case] or mode == "memory"
    off(pipe)
    off(reference)
    plain = run(case, reference)
    for _ in range(2):
        assert torch.equal(run(case, pipe), plain)
    on(pipe)
    assert torch.equal(run(case, pipe), switched[0])
    pipe.disable_layerwise_offload()
    assert torch.equal(run(case, pipe), switched[0])
    off(pipe)
    assert torch.equal(run(case, pipe), plain)


@IN_MODES
def test_skip_layer_guidance(mode: str, sim: ModuleType, cell: Cell) -> None:
    """Three passes in each step, of which the third one leaves layers out."""
    cell(TABLE, "`skip_guidance_layers`, SD 3", f"{mode}, after ours")
    options = {"skip_guidance_layers": [1, 2], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    reference, pipe = factory.CASES["sd3"].build(), factory.CASES["sd3"].build()
    handle = enable("sd3", pipe, mode)
    for _ in range(2):
        assert torch.equal(run("sd3", pipe, **options), run("sd3", reference, **options))
    saved = next(c for c in handle.report().components if c.name == "transformer").skipped_bytes
    assert saved > 0 or mode == "auto"
    assert torch.equal(run("sd3", pipe), run("sd3", reference))


# ---------------------------------------------------------------------- attention processors
class Projecting(nn.Module):
    """An attention processor with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FluxAttnProcessor()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.scale = nn.Linear(32, 32)

    def forward(self, attn: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The usual attention of a projected input."""
        return self.inner(attn, self.scale(hidden_states), *args, **kwargs)


def processors(*kinds: Callable[[], Any]) -> list[Switch]:
    """Switches that swap the denoiser's processors, each layer with one of its own."""

    def to(kind: Callable[[], Any]) -> Switch:
        def swap(pipe: DiffusionPipeline) -> None:
            denoiser = getattr(pipe, "unet", None) or pipe.transformer
            denoiser.set_attn_processor({name: kind() for name in denoiser.attn_processors})

        return swap

    return [to(kind) for kind in kinds]


class Reading:
    """An attention processor that reads a weight of its layer without calling the layer that owns it."""

    def __call__(self, attn: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The usual attention of an input that the weight of the values' projection has changed."""
        hidden_states = hidden_states + nn.functional.linear(hidden_states, attn.to_v.weight)
        return FluxAttnProcessor()(attn, hidden_states, *args, **kwargs)


SWAPS = {
    "plain, SD 1.5": ("sd15", processors(AttnProcessor, AttnProcessor2_0, AttnProcessor)),
    "with weights, Flux": ("flux", processors(Projecting, FluxAttnProcessor, Projecting)),
    "reads a layer's weight, Flux": ("flux", processors(Reading, FluxAttnProcessor, Reading)),
}


@IN_MODES
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", SWAPS)
def test_attention_processors_are_swapped_between_calls(
    name: str, when: str, mode: str, sim: ModuleType, cell: Cell
) -> None:
    case, swaps = SWAPS[name]
    cell(TABLE, f"`set_attn_processor()`, {name}", f"{mode}, {when} ours")
    reference, pipe = factory.CASES[case].build(), factory.CASES[case].build()
    swaps[0](reference)
    if when == "before":
        swaps[0](pipe)
    handle = enable(case, pipe, mode)
    if when == "after":
        run(case, pipe)
        swaps[0](pipe)
    weights = []
    for number, swap in enumerate(swaps):
        for each in (reference, pipe) if number else ():
            swap(each)
        for seed in (0, 1):
            assert torch.equal(run(case, pipe, seed), run(case, reference, seed)), number
        weights.append(handle.report().weights)
    assert weights[0] == weights[2]
    assert (weights[1] < weights[0]) == name.startswith("with weights"), "a processor's weights go with it"
    pipe.disable_layerwise_offload()
    assert torch.equal(run(case, pipe), run(case, reference))


# ---------------------------------------------------------------------- what is saved
@pytest.mark.parametrize("name", ["`FirstBlockCacheConfig`", "`TaylorSeerCacheConfig`", "`MagCacheConfig`"])
def test_the_report_counts_exactly_the_loads_that_were_not_made(name: str, sim: ModuleType) -> None:
    case, on, _ = SWITCHES[name]
    pipe = factory.CASES[case].build()
    handle = enable(case, pipe, "memory")
    schedule = next(s for s in handle._runtime.schedules if s.name == "transformer")

    def component() -> Any:
        return next(c for c in handle.report().components if c.name == "transformer")

    def spent(calls: int) -> tuple[int, int, int, int]:
        before = component()
        for _ in range(calls):
            run(case, pipe)
        after = component()
        return (
            after.moved_bytes - before.moved_bytes,
            after.skipped_bytes - before.skipped_bytes,
            after.skipped_loads - before.skipped_loads,
            after.dropped - before.dropped,
        )

    spent(2)
    plain, nothing, _, _ = spent(1)
    assert nothing == 0
    on(pipe)
    spent(2)
    computed = []
    layer = pipe.transformer.transformer_blocks[1].attn.to_q.register_forward_hook(lambda *_: computed.append(1))
    moved, saved, loads, dropped = spent(2)
    layer.remove()
    assert 0 < len(computed) < 2 * STEPS
    assert dropped == 0, "the passes of a call come as in the one before"
    assert saved == 2 * plain - moved
    if name == "`FirstBlockCacheConfig`":
        # Of a pass that skips, all groups that lie wholly behind the first block and before the projection out.
        kept = ("transformer_blocks.0.", "x_embedder", "context_embedder", "time_text_embed", "norm_out", "proj_out")
        gone = [g for g in schedule.groups if not any(u.name.startswith(kept) for u in g.units)]
        skipping = 2 * STEPS - len(computed)
        assert (loads, saved) == (skipping * len(gone), skipping * sum(g.copy_bytes for g in gone))
    assert "skipped layers saved" in str(handle.report())


def test_activations_are_measured_in_whole_passes(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = factory.CASES["flux"].build()
    first_block(pipe)
    handle = enable("flux", pipe, "auto", activation_reserve=None)
    fitting = handle._runtime.fitting
    measured: list[int] = []
    measure = fitting._measure

    def noted(pass_: Any) -> None:
        if pass_.schedule.name == "transformer":
            measured.append(len(pass_.schedule.record))
        measure(pass_)

    monkeypatch.setattr(fitting, "_measure", noted)
    for _ in range(2):
        run("flux", pipe)
    schedule = next(s for s in handle._runtime.schedules if s.name == "transformer")
    assert 0 < len(measured) < 2 * STEPS
    assert set(measured) == {len(schedule.order.uses)}


# ---------------------------------------------------------------------- several processes
@SLOW
def test_context_parallel_in_two_ranks(tmp_path: Path, cell: Cell) -> None:
    """Split and gather hooks are at the transformer's root and at its projection out, which is a unit of ours."""
    for mode in MODES:
        for when in ("before", "after"):
            cell(TABLE, "`ContextParallelConfig`, Ulysses, two ranks on the CPU", f"{mode}, {when} ours")
    program = str(Path(__file__).with_name("context_parallel.py"))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
    command = [sys.executable, program]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet")], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=240)
            assert rank.returncode == 0, output.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
