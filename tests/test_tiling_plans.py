"""Plans for a VAE in tiles: when one is made, and that its figures are those of such a call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline

import factory
from diffusers_layerwise import PredictedPlan, live, plan_layerwise_offload
from test_trace import fused, fused_norm

SIZE = {"height": 128, "width": 128}
CALL = factory.CASES["flux"].call_kwargs() | SIZE


def plan(pipe: DiffusionPipeline | None = None, **options: Any) -> PredictedPlan:
    """A plan for an image that is large for the small VAE."""
    pipe = factory.CASES["flux"].build() if pipe is None else pipe
    return plan_layerwise_offload(pipe, hardware="RTX 4090", **{**CALL, **options})


@pytest.fixture(scope="module")
def whole() -> PredictedPlan:
    """Without tiles, since the device has memory enough."""
    return plan()


def test_without_need_a_plan_has_no_tiles_and_says_what_they_would_save(whole: PredictedPlan) -> None:
    assert whole.tiled == ()
    assert whole.peak_at == "vae"
    assert any("pipe.vae.enable_tiling() lowers them to" in note for note in whole.notes)


def test_a_budget_that_needs_tiles_is_planned_with_them_and_says_so(whole: PredictedPlan) -> None:
    budget = whole.smallest_budget - 1
    tiled = plan(memory_budget=budget)
    assert tiled.tiled == ("vae",)
    assert tiled.total_peak_bytes <= budget
    assert tiled.smallest_budget < whole.smallest_budget
    assert any("this is with pipe.vae.enable_tiling()" in note for note in tiled.notes)
    assert tiled.to_dict()["tiled"] == ("vae",)


def test_tiles_can_be_asked_for_and_refused(whole: PredictedPlan) -> None:
    assert plan(vae_tiling=True).tiled == ("vae",)
    assert plan(vae_tiling=False).tiled == ()
    with pytest.raises(torch.OutOfMemoryError, match=r"pipe\.vae\.enable_tiling\(\) lowers that to"):
        plan(memory_budget=whole.smallest_budget - 1, vae_tiling=False)


def test_below_what_tiles_need_the_error_says_both_smallest_budgets(whole: PredictedPlan) -> None:
    least = plan(vae_tiling=True).smallest_budget
    assert plan(memory_budget=least).tiled == ("vae",)
    with pytest.raises(torch.OutOfMemoryError, match=rf"memory_budget={least} or more") as raised:
        plan(memory_budget=least - 1)
    assert "with pipe.vae.enable_tiling()" in str(raised.value)


def test_the_figures_are_those_of_a_pipeline_whose_tiling_is_on() -> None:
    asked = plan(vae_tiling=True)
    pipe = factory.CASES["flux"].build()
    pipe.vae.enable_tiling()
    on = plan(pipe)
    ours, theirs = ({p.name: p for p in made.predictions}["vae"] for made in (asked, on))
    assert ours.activation_peak == theirs.activation_peak
    assert ours.flops == pytest.approx(theirs.flops, rel=1e-3)
    assert asked.smallest_budget == on.smallest_budget


def test_the_peak_with_tiles_is_that_of_the_simulated_device(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2 %."""
    monkeypatch.setattr(live, "BLOCK", 1)  # the simulated device's allocator doesn't round
    predicted = {p.name: p for p in plan(vae_tiling=True).predictions}["vae"].activation_peak
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)
    monkeypatch.setattr(F, "rms_norm", fused_norm)
    pipe = factory.CASES["flux"].build().to("sim")
    pipe.vae.enable_tiling()
    weights, decode = sim.mem(0)["allocated"], pipe.vae.decode
    peaks: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        sim.reset_peak_memory_stats()
        result = decode(*args, **kwargs)
        peaks.append(sim.mem(0)["peak"] - weights)
        return result

    monkeypatch.setattr(pipe.vae, "decode", watched)
    factory.run("flux", pipe, **SIZE)
    assert predicted == pytest.approx(max(peaks), rel=0.02)
