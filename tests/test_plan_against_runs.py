"""Plans of full-size models against each other, and plans of small pipelines against what their runs count."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

import factory
from diffusers_layerwise import OffloadHandle, PredictedPlan, plan_layerwise_offload
from diffusers_layerwise.config import Mode, Residency
from diffusers_layerwise.cost import component_spec
from diffusers_layerwise.hardware import PRESETS, Hardware
from diffusers_layerwise.plan import ComponentPlan, ComponentSpec, GroupPlan, OffloadPlan, group_uses
from diffusers_layerwise.recorder import trace_module
from diffusers_layerwise.search import Request, make_plan, smallest_peak, steady_step
from diffusers_layerwise.selection import role
from diffusers_layerwise.simulate import LATENCY, Link
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
    held = spec.size + spec.fixed  # SD3.5 has a buffer of 0.33 GiB, which stays on the device
    assert held <= whole.peak_bytes <= 1.001 * held
    at_it = make_plan([spec], Request(Mode.AUTO, whole.peak_bytes, link=LINK))
    assert at_it.components[0].streamed_bytes == 0
    below = make_plan([spec], Request(Mode.AUTO, whole.peak_bytes - 1, link=LINK))
    # It streams, or a table stays on the host.
    assert below.components[0].resident_bytes < at_it.components[0].resident_bytes
    assert below.peak_bytes < whole.peak_bytes


# ---------------------------------------------------------------------- plans against runs
PIPELINES = "flux sdxl wan qwenimage sd3".split()
#: A device on which small pipelines compute about as long as their weights take over the link.
SLOW = Hardware("slow", 1 << 30, 1e8, 5e7, {"float32": 2e9}, 2e9, 1e15, 1e8, 1e-12, "made up")
#: The simulated device's clock at the same rates: its kernels take their FLOPs, its copies their bytes and a latency.
CLOCK = {
    "flops": 2e9,
    "hbm": 1e15,
    "h2d": SLOW.pinned,
    "pageable": SLOW.pageable,
    "launch": SLOW.launch,
    "kernel_min": 0.0,
    "copy_lat": LATENCY,
    "query": 0.0,
}
STEPS = 4
#: Ways to stream whose plans don't depend on times, so that what is predicted is what runs.
WAYS: dict[str, dict[str, Any]] = {
    "memory": {"mode": "memory"},
    "layers": {"mode": "manual", "config": {"group_size": "layer", "prefetch": 1}},
    "residents": {"mode": "manual", "config": {"resident": 0.4, "prefetch": 2, "placement": "spread"}},
    "lasting": {
        "mode": "manual",
        "config": {"resident": 0.4, "prefetch": 2, "placement": "spread", "residency": "lasting"},
    },
}
QUICK = [("flux", way) for way in WAYS] + [("wan", "memory"), ("qwenimage", "memory")]
RUNS = [
    pytest.param(name, way, marks=[] if (name, way) in QUICK else pytest.mark.slow, id=f"{name}-{way}")
    for name in PIPELINES
    for way in WAYS
]


@dataclasses.dataclass
class Ran:
    """A call of a pipeline under a handle whose plan has settled.

    Args:
        moved (`dict[str, int]`): Bytes that were copied in it for each component.
        per_pass (`dict[str, list[int]]`): The same between the beginnings of two passes of a denoiser.
        loads (`list[str]`): The groups that were loaded, in order.
        step (`float`): Virtual seconds of a step in the middle of the call.
    """

    plan: OffloadPlan
    peak: int
    moved: dict[str, int]
    per_pass: dict[str, list[int]]
    loads: list[str]
    step: float


def options_of(way: dict[str, Any]) -> dict[str, Any]:
    """What enabling and planning are given alike."""
    return {**way, "components": "all", "config": {"activation_reserve": 0} | way.get("config", {})}


def predicted(name: str, way: dict[str, Any]) -> PredictedPlan:
    """The plan for a small pipeline, made without a device."""
    call = factory.CASES[name].call_kwargs() | {"num_inference_steps": STEPS}
    return plan_layerwise_offload(factory.CASES[name].build(), hardware=SLOW, **options_of(way), **call)


def moved(handle: OffloadHandle) -> dict[str, int]:
    """Bytes that were copied so far."""
    return {component.name: component.moved_bytes for component in handle.report().components}


def ran(name: str, way: dict[str, Any], sim: ModuleType) -> Ran:
    """The fifth call of the same pipeline on the simulated device."""
    pipe = factory.CASES[name].build()
    handle = pipe.enable_layerwise_offload(onload_device="sim", **options_of(way))
    begun: dict[str, list[int]] = {}
    marks: list[torch.Event] = []

    def mark(*_: Any) -> None:
        marks.append(torch.Event("sim", enable_timing=True))
        marks[-1].record()

    for part, module in factory.modules_of(pipe).items():
        if role(part) == "dit":
            begun[part] = []
            module.register_forward_pre_hook(lambda *_, part=part: begun[part].append(moved(handle)[part]))
            module.register_forward_pre_hook(mark)
    for _ in range(4):
        factory.run(name, pipe, num_inference_steps=STEPS)
    assert not handle.plan.provisional
    transfer = handle._runtime.transfer
    before, transfer.log = moved(handle), []
    for starts in begun.values():
        starts.clear()
    marks.clear()
    factory.run(name, pipe, num_inference_steps=STEPS)
    log, transfer.log = transfer.log, None
    report, after = handle.report(), moved(handle)
    each = len(marks) // STEPS
    assert len(marks) == each * STEPS
    sim.synchronize()
    first, last = marks[each], marks[-each]
    step = first.elapsed_time(last) / 1e3 / (STEPS - 2)
    return Ran(
        handle.plan,
        report.peak_seen,
        {part: after[part] - before[part] for part in after},
        {part: [b - a for a, b in pairwise(starts)] for part, starts in begun.items()},
        [group for verb, group in log if verb == "load"],
        step,
    )


def sequence_of(plan: PredictedPlan) -> list[tuple[str, list[int]]]:
    """Each pass of the traced call in order: its component, and the units that it uses, as the plan numbers them."""
    assert plan.problem is not None
    trace = plan.problem.trace
    specs = {spec.name: spec for spec in plan.problem.specs}
    found = []
    for name, kind in trace.sequence:
        if name in specs:
            traced = trace.component(name)
            places = {unit.name: place for place, unit in enumerate(specs[name].units)}
            units = [traced.leaves[use.leaf].unit for use in traced.passes[kind].uses]
            found.append((name, [places[traced.units[unit].name] for unit in units if unit is not None]))
    return found


def uses_of(part: ComponentPlan, order: Sequence[int]) -> list[GroupPlan]:
    """The groups that a pass uses, in order."""
    runs = [(group.start, group.stop) for group in part.groups]
    return [part.groups[group] for group, _, _ in group_uses(order, runs)]


def should_move(part: ComponentPlan, passes: Sequence[Sequence[int]]) -> int:
    """Bytes that a call copies for a component: fixed weights and residents once, what streams for each use.

    Where residents last, both were copied in an earlier call.
    """
    uses = [uses_of(part, order) for order in passes]
    kept = {group.start: group.size for used in uses for group in used if group.resident}
    once = 0 if part.residency is Residency.LASTING else part.fixed + sum(kept.values())
    return once + sum(group.size for used in uses for group in used if not group.resident)


def used_peak(plan: OffloadPlan, sequence: Sequence[tuple[str, list[int]]]) -> int:
    """The plan's peak without residents that the call doesn't use, such as those of a VAE's encoder."""
    used: dict[str, dict[int, GroupPlan]] = {part.name: {} for part in plan.components}
    for name, order in sequence:
        used[name] |= {group.start: group for group in uses_of(plan.component(name), order)}
    return dataclasses.replace(
        plan,
        components=tuple(
            dataclasses.replace(part, groups=tuple(used[part.name].values())) if used[part.name] else part
            for part in plan.components
        ),
    ).peak_bytes


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_a_plan_made_without_a_device_is_what_the_run_counts(name: str, way: str, sim: ModuleType) -> None:
    """Peak of weights, bytes moved, and the order of loads: equal, not nearly. A step's time within 3 %."""
    sim.configure(**CLOCK)
    plan, run = predicted(name, WAYS[way]), ran(name, WAYS[way], sim)
    sequence = sequence_of(plan)
    assert (plan.slots, plan.slot_bytes) == (run.plan.slots, run.plan.slot_bytes)
    assert plan.peak_bytes == run.plan.peak_bytes
    assert used_peak(plan, sequence) == run.peak
    for part in plan.components:
        passes = [order for component, order in sequence if component == part.name]
        assert run.moved[part.name] == should_move(part, passes), part.name
    for denoiser, per_pass in run.per_pass.items():
        order = next(order for component, order in sequence if component == denoiser)
        streamed = sum(g.size for g in uses_of(plan.component(denoiser), order) if not g.resident)
        assert per_pass[1:-1], "no pass in the middle"
        assert set(per_pass[1:-1]) == {streamed}
    expected = [
        f"{component}.{group.name}"
        for component, order in sequence
        for group in uses_of(plan.component(component), order)
        if not group.resident
    ]
    assert [load for load in run.loads if load in set(expected)] == expected
    print(name, way, plan.step_seconds, run.step)
    assert plan.step_seconds == pytest.approx(run.step, rel=0.03)
