"""Plans of full-size models against each other, and plans of small pipelines against what their runs count."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise

import pytest

from diffusers_layerwise.config import Mode
from diffusers_layerwise.cost import component_spec
from diffusers_layerwise.hardware import PRESETS
from diffusers_layerwise.plan import ComponentSpec
from diffusers_layerwise.recorder import trace_module
from diffusers_layerwise.search import Request, make_plan, smallest_peak, steady_step
from diffusers_layerwise.simulate import Link
from planning_models import MODELS, on_meta

LINK = Link(22e9, 1e-5)
#: Models whose plans take some seconds each.
LARGE = {
    name
    for name, model in MODELS.items()
    if model.parameters > 2_000_000_000 and "UNet" not in name and "T5" not in name
}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in MODELS]


# ---------------------------------------------------------------------- modes against each other
@functools.cache
def units_of(name: str) -> ComponentSpec:
    """A full-size model as a plan sees it, in registration order and without times."""
    trace = trace_module(on_meta(name), lambda _: None, name)
    return component_spec(trace.components[0], PRESETS["A100"])


def timed(name: str, ratio: float) -> ComponentSpec:
    """The same with times: a use's seconds by its bytes, every third one twice as long, and a tenth of it after it.

    Args:
        ratio (`float`): The time of moving all of it over the time of computing with it.
    """
    spec = units_of(name)
    work = [spec.units[unit].size * (2.0 if place % 3 == 0 else 1.0) for place, unit in enumerate(spec.order)]
    scale = spec.size / LINK.bandwidth / ratio / (1.1 * sum(work))
    busy = tuple(w * scale for w in work)
    return dataclasses.replace(spec, busy=busy, gap=tuple(0.1 * b for b in busy))


def ten_budgets(spec: ComponentSpec) -> list[int]:
    """From the smallest that works to twice the weights."""
    least, most = smallest_peak([spec]), 2 * spec.weights
    return [least + (most - least) * i // 9 for i in range(10)]


@pytest.mark.parametrize("ratio", [0.5, 3.0])
@pytest.mark.parametrize("name", NAMES)
def test_auto_is_never_slower_than_the_other_modes_and_every_plan_is_within_its_budget(name: str, ratio: float) -> None:
    spec = timed(name, ratio)
    compute = sum(spec.busy or ()) + sum(spec.gap or ())
    autos = []
    for budget in ten_budgets(spec):
        plans = {m: make_plan([spec], Request(m, budget, link=LINK)) for m in (Mode.AUTO, Mode.MEMORY, Mode.SPEED)}
        assert all(plan.peak_bytes <= budget for plan in plans.values())
        steps = {mode: steady_step(spec, plan, LINK) for mode, plan in plans.items()}
        autos.append(steps[Mode.AUTO])
        assert steps[Mode.AUTO] <= 1.0001 * min(steps.values()), (budget, steps)
        assert steps[Mode.AUTO] >= 0.9999 * compute
    assert autos[-1] == pytest.approx(compute)
    assert all(later <= 1.005 * sooner for sooner, later in pairwise(autos))


@pytest.mark.parametrize("name", NAMES)
def test_all_of_a_model_is_resident_exactly_from_the_peak_of_that_on(name: str) -> None:
    spec = timed(name, 3.0)
    whole = make_plan([spec], Request(Mode.AUTO, 2 * spec.weights, link=LINK))
    assert (whole.slots, whole.components[0].streamed_bytes) == (0, 0)
    assert spec.weights <= whole.peak_bytes <= 1.001 * spec.weights + 4096
    at_it = make_plan([spec], Request(Mode.AUTO, whole.peak_bytes, link=LINK))
    assert at_it.components[0].streamed_bytes == 0
    below = make_plan([spec], Request(Mode.AUTO, whole.peak_bytes - 1, link=LINK))
    assert below.components[0].streamed_bytes > 0
    assert below.peak_bytes < whole.peak_bytes
